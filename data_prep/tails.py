"""The ends of a split: what all segments left over, joined in order; a split that is too small is refused."""

from __future__ import annotations

import numpy as np

from data_prep.errors import StarvedSplitError
from data_prep.journal import Journal
from data_prep.manifest import ShardEntry, TokenCounts
from data_prep.packing import MOST_IDS
from data_prep.plan import Plan, Split
from data_prep.record import SegmentRecord
from data_prep.shards import SUFFIX, ShardWriter
from data_prep.tokenizer import Tokenizer


def filler_id(tokenizer: Tokenizer) -> int:
    """The id that fills up a last sequence: padding, or EOS, BOS, 0 for a tokenizer without. Readers count filler
    and never look for the id, so it need not be one that no text holds."""
    known = (tokenizer.pad_id, tokenizer.eos_id, tokenizer.bos_id)
    return next((number for number in known if number is not None), 0)


def join_tails(
    plan: Plan, journal: Journal, split: Split, source: int, records: list[SegmentRecord], filler: int
) -> tuple[ShardEntry | None, int]:
    """What the segments of one source left over, one after the other, as one more shard.

    The last, incomplete sequence is filled up with ``filler`` where ``prep.keep_tail`` names the split.

    Returns:
        The shard (``None``: there was not one sequence), and the number of ids that were left out.

    Raises:
        StarvedSplitError: the last sequence would be ``MOST_IDS`` of filler and more.
    """
    prep = plan.prep
    missing = _filler(plan, split, sum(r.splits[split.name].tail_tokens for r in records))
    dtype = np.dtype(plan.dtype).newbyteorder("<")
    writer = ShardWriter(
        journal.data_dir / split.name / f"tail-{source:06d}{SUFFIX}",
        dtype,
        alignment=prep.alignment,
        sequence_length=prep.sequence_length,
        max_id=plan.vocab_size - 1,
    )
    for record in records:
        path = journal.record_path(record.item, record.segment).with_suffix(f".{split.name}.tail")
        writer.append(np.fromfile(path, dtype))
    writer.append(np.full(missing, filler, dtype))
    header, left = writer.close()
    if header is None:
        return None, len(left)
    entry = ShardEntry(
        name=writer.path.name,
        num_sequences=header.num_sequences,
        checksum=f"{header.checksum:016x}",
        max_id=header.max_id,
        source=source,
        origin="ends of all segments",
        filler=missing,
    )
    return entry, len(left)


def _filler(plan: Plan, split: Split, left_over: int) -> int:
    """Ids that fill up the last sequence of a split that keeps it."""
    length = plan.prep.sequence_length
    missing = -left_over % length if split.name in plan.prep.keep_tail else 0
    if missing > MOST_IDS:
        raise StarvedSplitError(
            f"the last sequence of the split {split.name!r} has {left_over % length:,} tokens of {length:,}, and "
            "prep.keep_tail would fill it up: lower prep.sequence_length, or take the split out of prep.keep_tail"
        )
    return missing


def refuse_starved(
    plan: Plan, split: Split, tokens: TokenCounts, shards: list[ShardEntry], records: list[SegmentRecord]
) -> None:
    """Refuse a split without one whole sequence: training could not read it.

    A held-out text that has the corpus to itself may be shorter when its tail is stored: it is scored as it is.

    Raises:
        StarvedSplitError: names the split and the smallest share that works.
    """
    length = plan.prep.sequence_length
    got = tokens.text + tokens.bos + tokens.eos
    whole = sum(s.num_sequences for s in shards) - sum(s.filler > 0 for s in shards)
    if whole or (shards and len(plan.splits) == 1 and split.name == "heldout"):
        return
    everything = sum(
        o.text_tokens + o.bos + o.eos + o.padding for record in records for o in record.splits.values()
    )
    if everything < length or split.name == "train":
        raise StarvedSplitError(
            f"the split {split.name!r} got {got} of {everything} tokens, less than one sequence of {length}: "
            "add text or lower prep.sequence_length"
        )
    raise StarvedSplitError(
        f"prep.splits.{split.name} = {split.high - split.low:g} gives the split {split.name!r} {got} tokens, "
        f"less than one sequence of {length}: the smallest share that works with this corpus is about "
        f"{min(1.0, 1.2 * length / everything):.2g}"
    )
