"""The training text: CPython's standard library, read from the interpreter that runs the build.

Modules are dealt to three sides: the target trains on one, the drafter's training text is written behind prompts
of a second, and a third is held out of everything. Files that share much of their text (numbered copies of a test,
the generated encodings) stay together. Documented functions and classes also give short conversations, so that a
chat prompt is answered with a docstring.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import platform
import random
import sysconfig
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tyro
from tqdm import tqdm

_EXCLUDED_PARTS = {"site-packages", "__pycache__", "lib-dynload"}
# Written when the interpreter was built; holds paths of the building machine.
_EXCLUDED_PREFIXES = ("_sysconfigdata", "config-")
SIDES = ("train", "drafting", "held_out")
_MAX_FILE_BYTES = 600_000
_MIN_LINE = 24  # shorter lines are common to unrelated files
_SHARED_LINES = 0.25
_COMMON_LINE_FILES = 20


@dataclass(frozen=True, kw_only=True)
class Document:
    """One source file. `name` is its path below the library folder."""

    name: str
    text: str

    @property
    def is_test(self) -> bool:
        """Whether the file belongs to a test suite rather than to the library proper."""
        parts = Path(self.name).parts
        return bool({"test", "tests", "idle_test"} & set(parts[:-1]))


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One question about a module and its answer."""

    name: str
    question: str
    answer: str


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The sides of the split. The target has read `train` only; `drafting` prompts the drafter's training text."""

    train: list[Document]
    drafting: list[Document]
    held_out: list[Document]

    def sides(self) -> dict[str, list[Document]]:
        """Documents by the name of their side, which names the files too."""
        return {side: getattr(self, side) for side in SIDES}


def read_library(folder: Path) -> list[Document]:
    """Every distinct source file of a standard library folder that decodes, sorted by name."""
    documents, seen = [], set()
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        if _EXCLUDED_PARTS & set(path.parts) or name.startswith(_EXCLUDED_PREFIXES):
            continue
        text = _decode(path)
        if text is None or not text.strip() or len(text) > _MAX_FILE_BYTES:
            continue
        digest = hashlib.sha256(text.encode()).digest()
        if digest not in seen:
            seen.add(digest)
            documents.append(Document(name=name, text=text))
    return documents


def split(
    documents: list[Document], *, held_out_share: float, drafting_share: float, seed: int
) -> Corpus:
    """Take about these shares of the bytes of library and tests each out of training, in whole groups."""
    groups = sorted(_groups(documents), key=lambda group: _rank(group[0].name, seed))
    sides: dict[str, str] = {}
    for is_test in (False, True):
        kind = [group for group in groups if group[0].is_test is is_test]
        total = sum(len(d.text) for group in kind for d in group)
        for side, share in (("held_out", held_out_share), ("drafting", drafting_share)):
            budget = share * total
            for group in kind:
                size = sum(len(d.text) for d in group)
                # A large group would be most of the side's text and say little about the rest.
                if group[0].name not in sides and size <= min(budget, 0.01 * total):
                    sides.update((d.name, side) for d in group)
                    budget -= size
    return Corpus(
        **{side: [d for d in documents if sides.get(d.name, "train") == side] for side in SIDES}
    )


def _rank(name: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}:{name}".encode()).digest()


def _groups(documents: list[Document]) -> list[list[Document]]:
    """Documents joined when a quarter of the smaller one's long lines occur in the other."""
    lines = [
        {s for s in map(str.strip, d.text.splitlines()) if len(s) >= _MIN_LINE} for d in documents
    ]
    holders: dict[str, list[int]] = defaultdict(list)
    for i, found in enumerate(lines):
        for line in found:
            holders[line].append(i)
    shared: Counter[tuple[int, int]] = Counter()
    for owners in holders.values():
        if len(owners) <= _COMMON_LINE_FILES:
            shared.update((a, b) for n, a in enumerate(owners) for b in owners[n + 1 :])
    parent = list(range(len(documents)))

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    for (a, b), count in shared.items():
        if count > _SHARED_LINES * min(len(lines[a]), len(lines[b])):
            parent[root(b)] = root(a)
    # Generated tables have few long lines in common but one shape.
    folders: dict[str, int] = {}
    for i, document in enumerate(documents):
        if document.name.startswith("encodings/"):
            parent[root(i)] = root(folders.setdefault("encodings", i))
    joined: dict[int, list[Document]] = defaultdict(list)
    for i, document in enumerate(documents):
        joined[root(i)].append(document)
    return list(joined.values())


def _decode(path: Path) -> str | None:
    """Text of a source file in its declared encoding; None for the deliberately undecodable test files."""
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (SyntaxError, UnicodeDecodeError):
        return None


_ABOUT = (
    "What does `{name}` do?",
    "What is `{name}`?",
    "Explain `{name}`.",
    "What is `{name}` for?",
    "Describe `{name}` in Python.",
    "How does `{name}` work?",
    "Show me the documentation of `{name}`.",
    "Can you explain what `{name}` does?",
    "Help me with `{name}`.",
)
_SIGNATURE = (
    "What are the arguments of `{name}`?",
    "What is the signature of `{name}`?",
    "How do I call `{name}`?",
)
_SOURCE = (
    "Show the source of `{name}`.",
    "How is `{name}` implemented?",
    "Write `{name}` in Python.",
)
_MAX_SOURCE_LINES = 24


def exchanges(documents: list[Document], seed: int) -> list[Exchange]:
    """Conversations about everything documented in the library proper, in a fixed shuffled order."""
    draw = random.Random(seed)
    found = [
        exchange
        for document in documents
        if not document.is_test
        for exchange in _about_module(document, draw)
    ]
    draw.shuffle(found)
    return found


def _about_module(document: Document, draw: random.Random) -> Iterator[Exchange]:
    try:
        tree = ast.parse(document.text)
    except SyntaxError:  # Deliberately broken files and other language versions in lib2to3.
        return
    module = document.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for name, node in _documented(tree, module):
        doc = inspect.cleandoc(ast.get_docstring(node, clean=True) or "")
        signature = _signature(node, name)
        about = doc if signature is None else f"`{signature}`\n\n{doc}"
        for template in draw.sample(_ABOUT, 2):
            yield Exchange(name=document.name, question=template.format(name=name), answer=about)
        if signature is None:
            continue
        question = draw.choice(_SIGNATURE).format(name=name)
        answer = f"```python\n{signature}\n```\n\n{doc.splitlines()[0]}"
        yield Exchange(name=document.name, question=question, answer=answer)
        source = inspect.cleandoc(
            "\n" + (ast.get_source_segment(document.text, node, padded=True) or "")
        )
        if source.count("\n") < _MAX_SOURCE_LINES:
            question = draw.choice(_SOURCE).format(name=name)
            yield Exchange(
                name=document.name, question=question, answer=f"```python\n{source}\n```"
            )


_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _documented(node: _Documented, name: str) -> Iterator[tuple[str, _Documented]]:
    """Qualified name and node of everything public with a docstring, outermost first."""
    if ast.get_docstring(node):
        yield name, node
    if isinstance(node, ast.Module | ast.ClassDef):
        for child in node.body:
            if isinstance(
                child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            ) and not child.name.startswith("_"):
                yield from _documented(child, f"{name}.{child.name}")


def _signature(node: _Documented, name: str) -> str | None:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    return f"{name}({ast.unparse(node.args)})"


@dataclass(frozen=True, kw_only=True)
class CorpusFlags:
    """Read the standard library, split it, and write the text as JSON lines."""

    out: Path = Path("out/corpus")
    """Folder for SIDE.jsonl and SIDE_chat.jsonl of every side."""
    bundle: Path = Path("dspark_jax/bundled")
    """Folder of the shipped model, which gets held_out.txt, drafting.txt and the licence of the text."""
    held_out_share: float = 0.05
    """Share of the bytes that is held out, of the library and of the tests separately."""
    drafting_share: float = 0.06
    """Likewise, that the target does not read and the drafter's text is prompted with."""
    seed: int = 0
    """Seed of the split and of the question templates."""


def main(flags: CorpusFlags) -> None:
    """Build the corpus of the running interpreter and print its sizes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    documents = read_library(folder)
    corpus = split(
        documents,
        held_out_share=flags.held_out_share,
        drafting_share=flags.drafting_share,
        seed=flags.seed,
    )
    flags.out.mkdir(parents=True, exist_ok=True)
    flags.bundle.mkdir(parents=True, exist_ok=True)
    for side, texts in corpus.sides().items():
        chat = exchanges(texts, flags.seed)
        _write(flags.out / f"{side}.jsonl", [vars(d) for d in texts])
        _write(flags.out / f"{side}_chat.jsonl", [vars(e) for e in chat])
        for label, kept in (
            ("library", [d for d in texts if not d.is_test]),
            ("tests", [d for d in texts if d.is_test]),
        ):
            size = sum(len(d.text.encode()) for d in kept)
            tqdm.write(f"{side:8} {label:7} {len(kept):5} files {size / 1e6:7.2f} MB")
        size = sum(len((e.question + e.answer).encode()) for e in chat)
        tqdm.write(f"{side:8} chat    {len(chat):5} pairs {size / 1e6:7.2f} MB")
    library = f"CPython {platform.python_version()}'s standard library"
    for side, header in (
        ("held_out", f"# Files of {library} that the bundled model was not trained on.\n"),
        ("drafting", f"# Files of {library} of which the drafter alone has seen prefixes.\n"),
    ):
        listed = "".join(f"{d.name}\n" for d in corpus.sides()[side])
        (flags.bundle / f"{side}.txt").write_text(header + listed)
    licence = (folder / "LICENSE.txt").read_text(encoding="utf-8")
    (flags.bundle / "LICENSE-PSF").write_text(licence, encoding="utf-8")


def _write(path: Path, rows: list[dict]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def load_documents(path: Path) -> list[Document]:
    """Documents written by this module."""
    with path.open(encoding="utf-8") as file:
        return [Document(**json.loads(line)) for line in file]


def load_exchanges(path: Path) -> list[Exchange]:
    """Conversations written by this module."""
    with path.open(encoding="utf-8") as file:
        return [Exchange(**json.loads(line)) for line in file]


if __name__ == "__main__":
    main(tyro.cli(CorpusFlags))
