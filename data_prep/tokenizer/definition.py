"""Reading a tokenizer's definition: ``tokenizer.json`` (Hugging Face) or tiktoken ranks (Llama 3's
``tokenizer.model``) become one ``TokenizerSpec``, from which every encoder is built."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from calm_scale.config.data import TokenizerConfig
from calm_scale.config.quantities import counted
from data_prep.errors import TokenizerError
from data_prep.inputs.records import iterate_texts

BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "[BOS]", "<|startoftext|>", "<|begin_of_sentence|>")
EOS_NAMES = ("<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|endoftext|>", "<|end_of_sentence|>")
PAD_NAMES = ("<|pad|>", "<pad>", "[PAD]", "<|finetune_right_pad_id|>")
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_NAMED = {
    0: "<|begin_of_text|>",
    1: "<|end_of_text|>",
    4: "<|finetune_right_pad_id|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    8: "<|eom_id|>",
    9: "<|eot_id|>",
    10: "<|python_tag|>",
}
_LLAMA3_NUM_SPECIAL = 256
SPECIAL_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", "<|pad|>")


@dataclass(frozen=True)
class TokenizerSpec:
    """A tokenizer's definition.

    ``json`` is the text of a tokenizer.json whose post-processor inserts BOS/EOS by this run's policy.
    ``has_ranks``: ``file`` holds tiktoken ranks. ``max_id`` covers every added token.
    """

    file: Path
    json: str
    has_ranks: bool
    specials: dict[str, int]
    max_id: int
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    add_bos: bool
    add_eos: bool

    @property
    def name(self) -> str:
        """The file's name."""
        return self.file.name

    @cached_property
    def ranks(self) -> dict[bytes, int]:
        """The tiktoken ranks in ``file``."""
        return _read_ranks(self.file)


def read_spec(config: TokenizerConfig, path: Path) -> TokenizerSpec:
    """Read the definition at ``path``: a file, or a folder with tokenizer.json or tokenizer.model.

    Raises:
        TokenizerError: nothing readable there, or a special token the policy needs is unknown.
    """
    file = find_definition(path)
    has_ranks = file.suffix != ".json"
    definition = _definition_of_ranks(_read_ranks(file)) if has_ranks else _read_json(file)
    _check_alphabet(definition, file)
    specials = {t["content"]: t["id"] for t in definition.get("added_tokens") or [] if t.get("special")}
    ids = [*definition["model"]["vocab"].values(), *(t["id"] for t in definition.get("added_tokens") or [])]
    max_id = max(ids)
    bos = _special("bos", config.bos_token, BOS_NAMES, specials, file, needed=config.add_bos)
    eos = _special("eos", config.eos_token, EOS_NAMES, specials, file, needed=config.add_eos)
    pad_name = config.pad_token or next((name for name in PAD_NAMES if name in specials), None)
    pad = specials.get(pad_name) if pad_name else None
    if pad_name and pad is None:
        pad = max_id = max_id + 1
    framed = _framed(definition, bos if config.add_bos else None, eos if config.add_eos else None, specials)
    return TokenizerSpec(
        file=file,
        json=json.dumps(framed, ensure_ascii=False, separators=(",", ":")),
        has_ranks=has_ranks,
        specials=specials,
        max_id=max_id,
        bos_id=bos,
        eos_id=eos,
        pad_id=pad,
        add_bos=config.add_bos,
        add_eos=config.add_eos,
    )


def _check_alphabet(definition: dict[str, Any], file: Path) -> None:
    """Refuse a vocabulary without an unknown token that is not made of bytes, or lacks bytes of UTF-8: the encoder
    leaves out what it does not know, without a word.

    Raises:
        TokenizerError: names the missing bytes.
    """
    model = definition["model"]
    if model.get("unk_token") in model["vocab"]:
        return
    if any("'ByteLevel'" in str(definition.get(part)) for part in ("pre_tokenizer", "normalizer")):
        names = byte_letters()
    elif model.get("byte_fallback"):
        names = {byte: f"<0x{byte:02X}>" for byte in range(256)}
    elif model.get("type") == "WordPiece":  # which refuses a text with an unknown word itself
        return
    else:
        raise TokenizerError(
            f"{file}: its vocabulary is made of characters and has neither an unknown token nor `byte_fallback`, so "
            "other characters would be lost: use a byte-level tokenizer, or one with `unk_token`",
            mistake=True,
        )
    in_utf8 = (*range(0xC0), *range(0xC2, 0xF5))
    missing = [f"0x{byte:02X}" for byte in in_utf8 if names[byte] not in model["vocab"]]
    if missing:
        shown = ", ".join(missing[:8]) + (", …" if len(missing) > 8 else "")
        raise TokenizerError(
            f"{file}: its byte alphabet is incomplete ({counted(len(missing), 'byte')} missing: {shown}) and it has no "
            "unknown token, so characters would be lost: use a tokenizer with all bytes, or one with `unk_token`",
            mistake=True,
        )


def find_definition(path: Path) -> Path:
    """The file at ``path``, or the tokenizer.json or tokenizer.model in the folder ``path``.

    Raises:
        TokenizerError: there is none.
    """
    if path.is_dir():
        for name in ("tokenizer.json", "tokenizer.model"):
            if (path / name).is_file():
                return path / name
        raise TokenizerError(
            f"the folder {path} holds neither tokenizer.json nor tokenizer.model", mistake=True
        )
    if not path.is_file():
        raise TokenizerError(
            f"there is no tokenizer at {path}: set tokenizer.path to a tokenizer.json, a tokenizer.model "
            "(tiktoken ranks) or a folder with one",
            mistake=True,
        )
    return path


def _special(
    role: str,
    named: str | None,
    usual: tuple[str, ...],
    specials: dict[str, int],
    file: Path,
    *,
    needed: bool,
) -> int | None:
    if named is not None and named not in specials:
        known = ", ".join(list(specials)[:8]) or "none"
        raise TokenizerError(
            f"tokenizer.{role}_token {named!r} is no special token of {file} (it has: {known})", mistake=True
        )
    name = named or next((n for n in usual if n in specials), None)
    if name is None and needed:
        raise TokenizerError(
            f"{file} has no {role.upper()} token by a usual name: set tokenizer.{role}_token, or "
            f"tokenizer.add_{role}: false",
            mistake=True,
        )
    return specials[name] if name else None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        definition = json.loads(file.read_text(encoding="utf-8"))
        vocabulary = definition["model"]["vocab"]
    except ValueError as error:
        raise TokenizerError(f"{file} is not a tokenizer.json: {error}", mistake=True) from None
    except (KeyError, TypeError):
        raise TokenizerError(
            f"{file} is not a tokenizer.json: it has no `model` with a `vocab`", mistake=True
        ) from None
    if not isinstance(vocabulary, dict):
        raise TokenizerError(
            f"{file}: only vocabularies that map token → id (BPE, WordPiece) are supported", mistake=True
        )
    added = definition.get("added_tokens") or []
    for place, ids in (
        ("model.vocab", vocabulary.values()),
        ("added_tokens", [token.get("id") if isinstance(token, dict) else None for token in added]),
    ):
        if not all(type(number) is int and 0 <= number < 1 << 32 for number in ids):
            raise TokenizerError(
                f"{file}: {place} holds an id that is no number from 0 to 2^32 - 1", mistake=True
            )
    if not all(isinstance(token.get("content"), str) for token in added):
        raise TokenizerError(f"{file}: added_tokens holds a token without `content`", mistake=True)
    if not vocabulary:
        raise TokenizerError(f"{file}: its vocabulary is empty", mistake=True)
    # Leftovers of inference settings would cut documents or drop merges at random.
    model = (
        {**definition["model"], "dropout": None} if "dropout" in definition["model"] else definition["model"]
    )
    return {**definition, "model": model, "truncation": None, "padding": None}


def _read_ranks(file: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except (ValueError, binascii.Error):
                raise TokenizerError(
                    f"{file}:{number} is not a line of tiktoken ranks (base64 token, rank); "
                    "SentencePiece models are not supported: convert them to tokenizer.json",
                    mistake=True,
                ) from None
    if not ranks:
        raise TokenizerError(f"{file} is empty", mistake=True)
    return ranks


def byte_letters() -> dict[int, str]:
    """The byte-level alphabet: printable Latin-1 bytes stand for themselves, the others for U+0100 upwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return {b: chr(b) for b in printable} | {b: chr(0x100 + i) for i, b in enumerate(hidden)}


def _definition_of_ranks(ranks: dict[bytes, int]) -> dict[str, Any]:
    """A byte-level BPE equal to the ranks: a pair may merge when its join is a token; the join's rank decides."""
    letters = str.maketrans({chr(byte): letter for byte, letter in byte_letters().items()})
    ordered = sorted(ranks, key=ranks.__getitem__)
    names = {token: token.decode("latin-1").translate(letters) for token in ordered}
    merges: list[str] = []
    for token in ordered:
        pairs = [
            (ranks[token[:i]], ranks[token[i:]], names[token[:i]], names[token[i:]])
            for i in range(1, len(token))
            if token[:i] in ranks and token[i:] in ranks
        ]
        if len(pairs) > 1:
            pairs.sort()
        merges += [f"{left} {right}" for _, _, left, right in pairs]
    first = max(ranks.values()) + 1
    reserved = iter(range(_LLAMA3_NUM_SPECIAL))
    added = [
        {
            "id": first + i,
            "content": _LLAMA3_NAMED.get(i) or f"<|reserved_special_token_{next(reserved)}|>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i in range(_LLAMA3_NUM_SPECIAL)
    ]
    split = {"type": "Split", "pattern": {"Regex": LLAMA3_PATTERN}, "behavior": "Isolated", "invert": False}
    letters_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, letters_only]},
        "post_processor": None,
        "decoder": letters_only,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {names[token]: ranks[token] for token in ordered},
            "merges": merges,
        },
    }


def _framed(
    definition: dict[str, Any], bos: int | None, eos: int | None, specials: dict[str, int]
) -> dict[str, Any]:
    """The same tokenizer with a post-processor that puts exactly this policy's BOS/EOS around a document."""
    names = {number: name for name, number in specials.items()}
    wrap = {number: names[number] for number in (bos, eos) if number is not None}
    if not wrap:
        return {**definition, "post_processor": None}

    def one(number: int | None) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": wrap[number], "type_id": 0}}] if number is not None else []

    body = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        **definition,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [*one(bos), body, *one(eos)],
            "pair": [body, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {n: {"id": n, "ids": [i], "tokens": [n]} for i, n in wrap.items()},
        },
    }


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
