"""What each source and each input gave: one without a usable record is named, and refused unless that is allowed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from pydantic import BaseModel

from data_prep.documents import HARMLESS, set_name
from data_prep.errors import PrepMistakeError, SourceError
from data_prep.inputs import Input
from data_prep.lines import BOM, LineStream
from data_prep.plan import Plan
from data_prep.record import SegmentRecord

_SAMPLED_RECORDS = 200
_NAMED_INPUTS = 5
_NAMED_KEYS = 12


class SourceCounts(BaseModel):
    """Records of one source: read = kept + filtered + duplicates + Σ quarantined.

    ``inputs`` counts its files (a dataset is one), ``unusable`` those without a usable record.
    """

    name: str
    inputs: int = 0
    unusable: int = 0
    read: int = 0
    kept: int = 0
    filtered: int = 0
    duplicates: int = 0
    quarantined: dict[str, int] = {}

    @property
    def lost(self) -> int:
        """Bad records: blank lines and empty documents lose nothing."""
        return sum(count for kind, count in self.quarantined.items() if kind not in HARMLESS)

    @property
    def usable(self) -> int:
        """Records with a text, kept or not."""
        return self.kept + self.duplicates


def count_inputs(plan: Plan, records: Iterable[SegmentRecord]) -> dict[int, SourceCounts]:
    """Records of each input that was not given up as corrupt, by its number in the plan."""
    counts: dict[int, SourceCounts] = {}
    for record in records:
        mine = counts.setdefault(record.item, SourceCounts(name=plan.inputs[record.item].name, inputs=1))
        mine.read += record.read
        mine.filtered += record.filtered
        mine.duplicates += record.duplicates
        mine.quarantined = dict(sorted((Counter(mine.quarantined) + Counter(record.quarantined)).items()))
    for mine in counts.values():
        mine.kept = mine.read - mine.filtered - mine.duplicates - sum(mine.quarantined.values())
        mine.unusable = int(not mine.usable)
    return counts


def count_sources(plan: Plan, inputs: dict[int, SourceCounts]) -> list[SourceCounts]:
    """The sums of ``inputs`` over each entry of ``prep.sources``."""
    sums = []
    for number, source in enumerate(plan.prep.sources):
        mine = [counts for item, counts in inputs.items() if plan.inputs[item].source == number]
        quarantined = sum((Counter(counts.quarantined) for counts in mine), Counter[str]())
        fields = ("inputs", "unusable", "read", "kept", "filtered", "duplicates")
        sums.append(
            SourceCounts(
                name=source.label,
                quarantined=dict(sorted(quarantined.items())),
                **{field: sum(getattr(counts, field) for counts in mine) for field in fields},
            )
        )
    return sums


def find_unusable(plan: Plan, inputs: dict[int, SourceCounts], sources: list[SourceCounts]) -> dict[str, str]:
    """Sources without a usable record, and inputs in which records were lost and none was usable: name → why.

    A file without any record, or one whose records are all of other sets, loses nothing and is only counted.
    """
    found: dict[str, str] = {}
    for number, counts in enumerate(sources):
        mine = {i: c for i, c in inputs.items() if plan.inputs[i].source == number and not c.usable}
        if not counts.usable:
            hint = describe_records(plan, plan.inputs[next(iter(mine))]) if mine else ""
            found[f"prep.sources[{number}]"] = f"{counts.name}: {_describe(counts)}{hint}"
        for item, one in mine.items() if counts.inputs > 1 else ():
            if one.lost:
                hint = describe_records(plan, plan.inputs[item]) if len(found) < _NAMED_INPUTS else ""
                found[one.name] = _describe(one) + hint
    return found


def refuse_unusable(plan: Plan, unusable: dict[str, str]) -> None:
    """Refuse sources and inputs without a usable record unless ``prep.on_unusable_input`` allows them.

    Raises:
        PrepMistakeError: names each, what is wrong with its records and the keys that were found in them.
    """
    if not unusable or plan.prep.on_unusable_input == "report":
        return
    lines = [f"  {name}: {why}" for name, why in islice(unusable.items(), _NAMED_INPUTS)]
    more = len(unusable) - len(lines)
    lines += [f"  and {more} more"] if more else []
    raise PrepMistakeError(
        "without a usable record:\n" + "\n".join(lines) + "\n"
        "Correct the sources, or go on without them: prep.on_unusable_input: report (finished work is kept)"
    )


def describe_records(plan: Plan, item: Input) -> str:
    """The keys (or the sets) found in the first records of an input that lack what its source asks for; else empty."""
    source, path = plan.prep.sources[item.source], f"prep.sources[{item.source}]"
    records = _first_records(item)
    if not records:
        return ""
    if not any(source.text_field in record for record in records):
        keys = list(dict.fromkeys(key for record in records for key in record))
        return (
            f". No record has the field `{source.text_field}`; fields found: {_join(keys)}. "
            f"Set {path}.text_field to the one that holds the text"
        )
    if source.include_sets or source.exclude_sets:
        sets = {name for record in records if (name := set_name(record.get("meta"))) is not None}
        return f". Sets found: {_join(sorted(sets)) or 'none'}; see {path}.include_sets and exclude_sets"
    return ""


def _describe(counts: SourceCounts) -> str:
    kinds = {**counts.quarantined, **({"of other sets": counts.filtered} if counts.filtered else {})}
    shown = ", ".join(f"{kind} {count:,}" for kind, count in kinds.items())
    return f"{counts.read:,} records, none usable{f' ({shown})' if shown else ''}"


def _first_records(item: Input) -> list[dict[str, object]]:
    """JSON objects of the first lines of a file of lines; none of another input or of one that cannot be read."""
    if item.is_dataset or item.kind == "parquet":
        return []
    try:
        block = next(LineStream(Path(item.name), item.kind, 1 << 62).blocks(0), None)
    except (SourceError, OSError):
        return []
    records = []
    for line in block.data.split(b"\n", _SAMPLED_RECORDS)[:_SAMPLED_RECORDS] if block else []:
        try:
            record = json.loads(line.removeprefix(BOM))
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def _join(names: list[str]) -> str:
    shown = [f"`{name[:40]}`" for name in names[:_NAMED_KEYS]]
    return ", ".join(shown + ["…"] * (len(names) > _NAMED_KEYS))
