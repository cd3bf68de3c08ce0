"""Training a small byte-level BPE tokenizer on a corpus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from data_prep.sources import iterate_texts

SPECIAL_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", "<|pad|>")


def train_bpe(
    paths: Iterable[Path],
    vocab_size: int,
    out: Path,
    *,
    max_megabytes: float = 32.0,
    text_field: str = "text",
) -> Path:
    """Train a byte-level BPE with ``vocab_size`` ids (specials included) and write ``out``, a tokenizer.json.

    The special tokens take ids 0, 1, 2; every text round-trips byte for byte. At most ``max_megabytes`` of
    text are used. Same texts, same file.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    from data_prep.tokenizer_spec import LLAMA3_PATTERN

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, letters])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_some(iterate_texts(paths, text_field), max_megabytes), trainer)
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(out.name + ".part")
    tokenizer.save(str(part))
    part.replace(out)
    return out


def _some(texts: Iterator[str], megabytes: float) -> Iterator[str]:
    left = megabytes * 1e6
    for text in texts:
        if left <= 0:
            return
        left -= len(text)
        yield text
