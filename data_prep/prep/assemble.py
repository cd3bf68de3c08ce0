"""From finished segments to finished splits: tails joined in order, counts summed, manifests written last."""

from __future__ import annotations

import json
import shutil
import socket
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from calm_scale.config.files import FILE_WAIT_VARIABLE, file_wait_seconds, wait_until_visible
from data_prep.errors import PrepError, SourceError
from data_prep.inputs import Input
from data_prep.inputs.lines import BOM, LineStream
from data_prep.inputs.records import HARMLESS
from data_prep.inputs.tables import set_name
from data_prep.prep.journal import Journal, SegmentRecord, SourceCounts, SplitOutput, join_digests
from data_prep.prep.packing import JoinedTail, join_tails, refuse_starved
from data_prep.prep.prep_plan import Plan, Split
from data_prep.prep.prep_report import QUARANTINE_NAME, PrepReport, summarise
from data_prep.shards.manifest import (
    DocumentCounts,
    Manifest,
    ShardEntry,
    SourceEntry,
    TokenCounts,
)
from data_prep.tokenizer import Tokenizer

_NAMED_INPUTS = 5
_SAMPLED_RECORDS = 200
_NAMED_INPUTS = 5
_NAMED_KEYS = 12


@dataclass
class Totals:
    """Sums over every segment that is used."""

    read: int = 0
    filtered: int = 0
    duplicates: int = 0
    text_bytes: int = 0
    quarantined: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    corrupt: dict[str, str] = field(default_factory=dict)
    sources: list[SourceCounts] = field(default_factory=list)
    unusable: dict[str, str] = field(default_factory=dict)
    contents: list[str] = field(default_factory=list)

    @property
    def bad(self) -> int:
        """Records lost: blank lines and empty documents are none."""
        return sum(count for kind, count in self.quarantined.items() if kind not in HARMLESS)

    @property
    def kept(self) -> int:
        """Documents stored."""
        return self.read - self.filtered - self.duplicates - sum(self.quarantined.values())


def collect(plan: Plan, journal: Journal) -> tuple[list[SegmentRecord], Totals]:
    """Every segment's record, in order, and their sums; inputs given up as corrupt are left out.

    Raises:
        PrepError: a segment is missing.
    """
    records: list[SegmentRecord] = []
    totals = Totals()
    for item, source in enumerate(plan.inputs):
        late = wait_until_visible(partial(_unseen, journal, plan, item))
        found = _records_of(journal, item)
        broken = next((r.corrupt for r in found if r.corrupt), None)
        if broken:
            totals.corrupt[source.name] = broken
            totals.contents.append("")
            continue
        if late:
            raise PrepError(
                f"{late}: a worker wrote it, and {socket.gethostname()} does not see it after "
                f"{file_wait_seconds():g} s, so that {source.name} is not complete here; rerun prep, or "
                f"set {FILE_WAIT_VARIABLE} to wait longer"
            )
        records += found
        totals.contents.append(join_digests([record.content for record in found]))
    for record in records:
        totals.read += record.read
        totals.filtered += record.filtered
        totals.duplicates += record.duplicates
        totals.text_bytes += record.text_bytes
        totals.quarantined.update(record.quarantined)
        totals.notes.update(record.notes)
    inputs = count_inputs(plan, records)
    totals.sources = count_sources(plan, inputs)
    totals.unusable = find_unusable(plan, inputs, totals.sources)
    return records, totals


def _unseen(journal: Journal, plan: Plan, item: int) -> str:
    """What of an input's finished segments is not to be seen here yet: a record, a segment's end, its rejects."""
    found = _records_of(journal, item)
    if any(record.corrupt for record in found):
        return ""
    width = np.dtype(plan.dtype).itemsize
    for record in found:
        path = journal.record_path(record.item, record.segment)
        for name, output in record.splits.items():
            tail = path.with_suffix(f".{name}.tail")
            if output.tail_tokens and (not tail.exists() or tail.stat().st_size < output.tail_tokens * width):
                return str(tail)
        if record.quarantined and not path.with_suffix(".rejected").exists():
            return str(path.with_suffix(".rejected"))
    return "" if found and found[-1].last else str(journal.record_path(item, len(found)))


def _records_of(journal: Journal, item: int) -> list[SegmentRecord]:
    """Records 0, 1, … of one input up to its last; every record there is, when one of them is corrupt."""
    found: list[SegmentRecord] = []
    while (record := journal.read_record(item, len(found))) is not None:
        found.append(record)
        if record.last:
            return found
    stray = [
        journal.read_record(item, int(p.stem[7:])) for p in journal.root.glob(f"records/{item:06d}-*.json")
    ]
    return [r for r in stray if r is not None and r.corrupt] or found


def write_rejected(plan: Plan, journal: Journal, records: list[SegmentRecord], totals: Totals) -> Path | None:
    """Join the rejected records of all segments, in order, into ``data/quarantine.jsonl``."""
    target = journal.data_dir / QUARANTINE_NAME
    target.unlink(missing_ok=True)
    if not totals.quarantined:
        return None
    part = target.with_name(target.name + ".part")
    with part.open("wb") as out:
        for record in records:
            piece = journal.record_path(record.item, record.segment).with_suffix(".rejected")
            if piece.exists():
                with piece.open("rb") as file:
                    shutil.copyfileobj(file, out)
    part.replace(target)
    return target


def check_limit(plan: Plan, totals: Totals, rejected: Path | None) -> None:
    """End the run when too much was bad, or nothing was good.

    Raises:
        PrepError: says how much, of what kinds, and where the records are.
        PrepError: a source or an input has no usable record and ``prep.on_unusable_input`` is stop.
    """
    where = f"; every one is in {rejected} with its file and line" if rejected else ""
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(totals.quarantined.items()))
    if not totals.kept:
        gone = "; ".join(totals.corrupt.values())
        raise PrepError(
            f"no document is left of {totals.read} records read ({kinds or gone or 'all filtered out or none there'})"
            f"{where}{_list_unusable(totals)}"
        )
    considered = totals.kept + totals.bad + totals.duplicates + totals.filtered
    share = totals.bad / considered
    if share > plan.prep.max_bad_fraction:
        raise PrepError(
            f"{totals.bad} of {considered} records are bad ({share:.3%} > prep.max_bad_fraction "
            f"{plan.prep.max_bad_fraction:.3%}): {kinds}{where}. Repair the input, or raise the limit and rerun "
            f"(finished work is kept){_list_unusable(totals)}"
        )
    refuse_unusable(plan, totals.unusable)


def _list_unusable(totals: Totals) -> str:
    """The first inputs without a usable record, one a line."""
    return "".join(f"\n  {name}: {why}" for name, why in list(totals.unusable.items())[:_NAMED_INPUTS])


def write_split(
    plan: Plan,
    journal: Journal,
    tokenizer: Tokenizer,
    split: Split,
    records: list[SegmentRecord],
    totals: Totals,
) -> Manifest:
    """Write the tail shards of one split and build its manifest (not yet written).

    Raises:
        StarvedSplitError: the split did not get one whole sequence.
    """
    prep = plan.prep
    shards: list[ShardEntry] = []
    tails: list[JoinedTail] = []
    for source in range(len(prep.sources)):
        mine = [r for r in records if plan.inputs[r.item].source == source]
        shards += [entry for r in mine for entry in r.splits[split.name].shards]
        tails.append(join_tails(plan, journal, split, source, mine, tokenizer))
        shards += [tails[-1].shard] if tails[-1].shard is not None else []
    outputs = [r.splits[split.name] for r in records]
    num_sequences = sum(s.num_sequences for s in shards)
    tokens = TokenCounts(
        text=sum(o.text_tokens for o in outputs),
        bos=sum(o.bos for o in outputs),
        eos=sum(o.eos for o in outputs),
        boundaries=sum(tail.boundaries for tail in tails),
        padding=sum(o.padding for o in outputs)
        + sum(tail.padding for tail in tails)
        + sum(s.filler for s in shards),
        tail=sum(tail.left_out for tail in tails),
        stored=num_sequences * prep.sequence_length,
    )
    refuse_starved(plan, split, tokens, shards, records)
    kept = sum(o.documents for o in outputs)
    return Manifest(
        split=split.name,
        dtype=plan.dtype,
        alignment=prep.alignment,
        sequence_length=prep.sequence_length,
        num_sequences=num_sequences,
        vocab_size=plan.vocab_size,
        max_id=max(s.max_id for s in shards),
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        pad_id=tokenizer.pad_id,
        add_bos=tokenizer.add_bos,
        add_eos=tokenizer.add_eos,
        packing=prep.packing,
        tokenizer_fingerprint=tokenizer.fingerprint,
        tokenizer=tokenizer.name,
        documents=DocumentCounts(
            read=totals.read,
            kept=kept,
            other_splits=totals.kept - kept,
            filtered=totals.filtered,
            duplicates=totals.duplicates,
            quarantined=dict(sorted(totals.quarantined.items())),
        ),
        tokens=tokens,
        sources=_sources(plan, shards),
        shards=shards,
        length_histogram=_sum_histograms(outputs),
        notes=dict(sorted(totals.notes.items())),
        provenance={
            "plan": plan.key,
            "inputs": [{"name": i.name, "bytes": i.size, "identity": i.identity} for i in plan.inputs],
            "tokenizer": {
                **plan.tokenizer_config.model_dump(mode="json", exclude={"on_mismatch"}),
                "encoder": tokenizer.portable_encoder,
            },
            "corrupt_inputs": totals.corrupt,
            "unusable_inputs": totals.unusable,
            "share_of_documents": [split.low, split.high],
        },
    )


def reweigh(plan: Plan, data_dir: Path, report: PrepReport) -> PrepReport:
    """A finished prep under the plan's weights: they decide the order of training, so only manifests change."""
    summaries = []
    for split in report.splits:
        manifest = Manifest.read(data_dir / split.name)
        sources = _sources(plan, manifest.shards)
        if sources != manifest.sources:
            manifest = manifest.model_copy(update={"sources": sources})
            manifest.write(data_dir / split.name)
        summaries.append(summarise(manifest))
    if summaries != report.splits:
        report = report.model_copy(update={"splits": summaries})
        report.write()
    return report


def _sources(plan: Plan, shards: list[ShardEntry]) -> list[SourceEntry]:
    given = Counter[int]()
    for shard in shards:
        given[shard.source] += shard.num_sequences
    return [
        SourceEntry(name=s.label, weight=s.weight, num_sequences=given[number])
        for number, s in enumerate(plan.prep.sources)
    ]


def _sum_histograms(outputs: list[SplitOutput]) -> list[int]:
    total = np.zeros(64, np.int64)
    for output in outputs:
        total[: len(output.length_histogram)] += np.asarray(output.length_histogram, np.int64)
    return [int(n) for n in np.trim_zeros(total, "b")]


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
        PrepError: names each, what is wrong with its records and the keys that were found in them.
    """
    if not unusable or plan.prep.on_unusable_input == "report":
        return
    lines = [f"  {name}: {why}" for name, why in islice(unusable.items(), _NAMED_INPUTS)]
    more = len(unusable) - len(lines)
    lines += [f"  and {more} more"] if more else []
    raise PrepError(
        "without a usable record:\n" + "\n".join(lines) + "\n"
        "Correct the sources, or go on without them: prep.on_unusable_input: report (finished work is kept)",
        mistake=True,
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
    if not item.has_lines:
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
