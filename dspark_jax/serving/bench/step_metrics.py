"""Steps and their mean times by bucket, from the server's Prometheus page."""

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

_MEASURED, _PREDICTED = "dspark:step_ms", "dspark:predicted_step_ms"


@dataclass(frozen=True)
class StepTimes:
    """One reading: (histogram, bucket) -> number of steps and sum of their milliseconds."""

    counts: Mapping[tuple[str, int], float]
    sums: Mapping[tuple[str, int], float]

    @classmethod
    def parse(cls, text: str) -> "StepTimes":
        """Reads the Prometheus text format."""
        counts: dict[tuple[str, int], float] = {}
        sums: dict[tuple[str, int], float] = {}
        for family in text_string_to_metric_families(text):
            if family.name not in (_MEASURED, _PREDICTED):
                continue
            for sample in family.samples:
                into = {"_count": counts, "_sum": sums}.get(sample.name.removeprefix(family.name))
                if into is not None:
                    key = family.name, int(float(sample.labels["bucket"]))
                    into[key] = into.get(key, 0.0) + sample.value
        return cls(counts, sums)

    def since(self, before: "StepTimes") -> list[dict[str, float]]:
        """Steps between two readings, a row per bucket.

        Its keys: `bucket`, `steps`, `step_ms` and, where steps were predicted, `predicted_ms`, both means.
        """
        rows = []
        for name, bucket in sorted(self.counts):
            if name != _MEASURED:
                continue
            steps = self._new(before, (name, bucket))
            if not steps[0]:
                continue
            row = {"bucket": bucket, "steps": steps[0], "step_ms": steps[1] / steps[0]}
            predicted = self._new(before, (_PREDICTED, bucket))
            if predicted[0]:
                row["predicted_ms"] = predicted[1] / predicted[0]
            rows.append(row)
        return rows

    def _new(self, before: "StepTimes", key: tuple[str, int]) -> tuple[float, float]:
        return (
            self.counts.get(key, 0.0) - before.counts.get(key, 0.0),
            self.sums.get(key, 0.0) - before.sums.get(key, 0.0),
        )
