"""Request bodies of the two completion endpoints.

Fields and ranges are OpenAI's, extended by vLLM's sampling fields. A field that is not listed here
is refused by name; so is one that is understood but cannot be honoured.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NoReturn

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from dspark_jax.serving.request import MAX_LOGPROBS, MAX_STOP_TOKEN_IDS

MAX_CHOICES = 128
MAX_SEQUENCES = 2048
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
DEFAULT_MAX_TOKENS = 16

Efforts = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


def _unsupported(message: str, param: str | None = None) -> NoReturn:
    raise PydanticCustomError("unsupported", "{text}", {"text": message, "param": param})


def _invalid(message: str, param: str | None = None) -> NoReturn:
    """Complain about a value; `param` names the field where pydantic cannot know it."""
    raise PydanticCustomError("invalid", "{text}", {"text": message, "param": param})


def _only(*allowed: Any, remedy: str) -> AfterValidator:
    """Accept only values that ask for nothing."""

    def check(value: Any) -> Any:
        if value is not None and value not in allowed:
            _unsupported(f"This value is not supported: {remedy}")
        return value

    return AfterValidator(check)


Unconstrained = Annotated[Any, _only(remedy="output is not constrained; leave the field out")]


def _stop_strings(value: Any) -> Any:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(s, str) for s in strings):
        _invalid("a string or an array of strings is expected")
    if len(strings) > MAX_STOP_STRINGS:
        _invalid(f"at most {MAX_STOP_STRINGS} stop strings are allowed, got {len(strings)}")
    if not all(0 < len(s) <= MAX_STOP_CHARACTERS for s in strings):
        _invalid(f"stop strings have 1 to {MAX_STOP_CHARACTERS} characters")
    return strings


def _prompts(value: Any) -> list[str | list[int]]:
    if isinstance(value, str) or _is_ids(value):
        return [value]
    if not isinstance(value, list) or not all(isinstance(p, str) or _is_ids(p) for p in value):
        _invalid("a string, an array of token ids, or an array of either is expected")
    if not value:
        _invalid("the array is empty")
    return value


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


class StreamOptions(_Strict):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _GenerationBody(_Strict):
    """Fields that both endpoints share. Null is the default everywhere."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[Finite, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Finite, Field(gt=0)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: (
        Annotated[
            list[str],
            BeforeValidator(_stop_strings),
            WithJsonSchema(
                {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
            ),
        ]
        | None
    ) = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: Annotated[dict[str, Any] | None, _only({}, remedy="biases are not applied")] = None
    response_format: Annotated[
        dict[str, Any] | None,
        _only({"type": "text"}, remedy="output is not constrained; only {'type': 'text'} works"),
    ] = None
    structured_outputs: Unconstrained = None
    guided_json: Unconstrained = None
    guided_regex: Unconstrained = None
    guided_choice: Unconstrained = None
    guided_grammar: Unconstrained = None
    # Harmless: they change nothing about the reply.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> _GenerationBody:
        if self.stream_options is not None and not self.stream:
            _invalid("'stream_options' is only allowed with 'stream': true", "stream_options")
        return self


class CompletionBody(_GenerationBody):
    """Body of `POST /v1/completions`."""

    prompt: Annotated[
        list[str | list[int]],
        PlainValidator(_prompts),
        WithJsonSchema(
            {
                "description": "Text, token ids, or a list of either.",
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "integer"}},
                    {"type": "array", "items": {"type": "string"}},
                    {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
                ],
            }
        ),
    ]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    suffix: Annotated[str | None, _only("", remedy="text cannot be inserted before a suffix")] = (
        None
    )

    @model_validator(mode="after")
    def _best_of_is_n(self) -> CompletionBody:
        if self.best_of is not None and self.best_of != (self.n or 1):
            _unsupported("'best_of' must equal 'n': candidates are not ranked", "best_of")
        return self

    @model_validator(mode="after")
    def _not_too_many(self) -> CompletionBody:
        count = len(self.prompt) * (self.n or 1)
        if count > MAX_SEQUENCES:
            _invalid(f"prompts times 'n' is {count}; at most {MAX_SEQUENCES} are allowed", "n")
        return self


class TextPart(_Strict):
    """One part of a message; only text is understood."""

    type: Literal["text"]
    text: str


class FunctionCall(_Strict):
    """A call that the assistant made; `arguments` is a JSON object as text."""

    name: str
    arguments: str


class ToolCall(_Strict):
    """A tool call of an earlier assistant turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Tool(_Strict):
    """A function that the model may call. Its description goes into the prompt as it was given."""

    type: Literal["function"]
    function: dict[str, Any]

    @field_validator("function")
    @classmethod
    def _has_a_name(cls, value: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(value.get("name"), str) or not value["name"]:
            _invalid("a function needs a 'name'")
        return value


class Message(_Strict):
    """One message of a conversation, of any role."""

    role: Literal["system", "developer", "user", "assistant", "tool", "latest_reminder"]
    content: str | list[TextPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    tools: list[Tool] | None = None
    response_format: dict[str, Any] | None = None
    task: Literal["action", "query", "authority", "domain", "title", "read_url"] | None = None
    name: str | None = None
    # OpenAI's client sends these back with its own assistant messages.
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Annotated[Any, _only(remedy="only text is understood")] = None
    function_call: Annotated[Any, _only(remedy="use tool_calls")] = None

    @property
    def text(self) -> str:
        """The content as one string."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""


class TemplateOptions(_Strict):
    """Options of the prompt encoding; `enable_thinking` is another name for `thinking`."""

    thinking: bool | None = None
    enable_thinking: bool | None = None
    drop_thinking: bool | None = None
    reasoning_effort: Efforts | None = None


class ChatBody(_GenerationBody):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Annotated[
        str | dict[str, Any] | None, _only("auto", "none", remedy="use 'auto' or 'none'")
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, _only(True, remedy="the model decides how many calls it makes")
    ] = None
    reasoning_effort: Efforts | None = None
    chat_template_kwargs: TemplateOptions | None = None
    modalities: Annotated[list[str] | None, _only(["text"], remedy="only text is made")] = None
    functions: Annotated[list[Any] | None, _only(remedy="use 'tools'")] = None
    function_call: Annotated[Any, _only(remedy="use 'tool_choice'")] = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            _invalid("'top_logprobs' is only allowed with 'logprobs': true", "top_logprobs")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            _invalid("'max_tokens' and 'max_completion_tokens' disagree", "max_tokens")
        if self.max_tokens == 0:
            _invalid("'max_tokens' must be at least 1", "max_tokens")
        if self.messages[-1].role == "assistant":
            _invalid("the last message must not be the assistant's", "messages")
        return self
