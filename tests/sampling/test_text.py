"""Prompt and continuation together are what the tokenizer makes of all their ids, whatever its kind."""

from __future__ import annotations

import base64
import random

import pytest
from tokenizers import Tokenizer as Native
from tokenizers import decoders, models, normalizers, pre_tokenizers

from calm_scale.config.data import TokenizerConfig
from calm_scale.sampling.prompts import OpenText, split_prompt
from data_prep.tokenizer import load_tokenizer
from data_prep.tokenizer.definition import byte_letters

KINDS = ("metaspace", "prepend", "byte level", "tiktoken")
PROMPTS = ("of the", "", "ab", "of the ", " of", "é", "a € ab", "\N{GRINNING FACE}of")
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def definition(kind):
    special = {"<s>": 0, "</s>": 1}
    if kind == "byte level":
        vocab = special | {letter: 2 + byte for byte, letter in byte_letters().items()}
        native = Native(
            models.BPE(
                vocab | {"of": 258, "\u0120of": 259, "\u0120t": 260},
                [("o", "f"), ("\u0120", "of"), ("\u0120", "t")],
            )
        )
        native.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        native.decoder = decoders.ByteLevel()
    else:
        words = [SPACE, "o", "f", "t", "h", "e", "a", "b", "of", SPACE + "of", SPACE + "t"]
        vocab = special | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
        vocab |= {word: 258 + i for i, word in enumerate(words)}
        merges = [("o", "f"), (SPACE, "of"), (SPACE, "t")]
        native = Native(models.BPE(vocab, merges, unk_token="</s>", byte_fallback=True))
        if kind == "metaspace":
            native.pre_tokenizer = pre_tokenizers.Metaspace()
            native.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
        else:
            native.normalizer = normalizers.Sequence(
                [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
            )
            native.decoder = decoders.Sequence(
                [
                    decoders.Replace(SPACE, " "),
                    decoders.ByteFallback(),
                    decoders.Fuse(),
                    decoders.Strip(" ", 1, 0),
                ]
            )
    native.add_special_tokens(list(special))
    return native.to_str()


@pytest.fixture(params=KINDS)
def tokenizer(request, tmp_path):
    if request.param == "tiktoken":
        path = tmp_path / "tokenizer.model"
        tokens = [bytes([byte]) for byte in range(256)] + [b"of", b" of", b" t"]
        lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
        path.write_text("\n".join(lines) + "\n")
    else:
        path = tmp_path / "tokenizer.json"
        path.write_text(definition(request.param))
    return load_tokenizer(TokenizerConfig(encoder="tokenizers"), path)


def continued(tokenizer, prompt, new, *, stop=(), step=3):
    """The finished text, and the pieces that were streamed."""
    pieces = []
    ids = split_prompt(prompt, 0, tokenizer, 4, 1 << 20).ids
    text = OpenText(tokenizer.decode, ids, frozenset(), stop, len(new), pieces.append)
    for begin in range(0, len(new), step):
        text.extend(new[begin : begin + step])
    return text, pieces


@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompt_and_text_are_the_decoded_ids(tokenizer, prompt):
    """Also across patches, and where a character's bytes are spread over tokens."""
    generator = random.Random(prompt)
    ids = tokenizer.encode(prompt)
    readable = [tokenizer.encode(word) for word in ("of the", " of", "é€", "\N{GRINNING FACE}", " t", "a")]
    for step in (1, 3, 4):
        new = [i for _ in range(5) for i in generator.choice(readable)]
        text, pieces = continued(tokenizer, prompt, new, step=step)
        assert tokenizer.decode(ids) + text.text == tokenizer.decode(ids + new)
        assert "".join(pieces) == text.text


def test_a_stop_string_that_begins_with_a_space_is_found_at_the_front(tokenizer):
    new = tokenizer.encode("x of")[len(tokenizer.encode("x")) :]
    text, pieces = continued(tokenizer, "ab", [*new, *new], stop=(" of",))
    assert (text.finish, text.text, pieces) == ("stop", "", [])


def test_a_character_that_the_prompt_begins_is_completed(tokenizer):
    whole = tokenizer.encode("a€b")
    for cut in range(len(whole)):
        text, _ = continued(tokenizer, whole[:cut], whole[cut:])
        assert text.text.endswith("b")
        assert "\N{REPLACEMENT CHARACTER}" not in text.text


@pytest.mark.parametrize(
    ("policy", "before", "boundary"),
    [({}, 1, "bos_id"), ({"add_bos": False, "add_eos": True}, 0, "eos_id"), ({"add_bos": False}, 0, None)],
)
def test_a_prompt_is_framed_as_the_training_documents_are(tmp_path, policy, before, boundary):
    path = tmp_path / "tokenizer.json"
    path.write_text(definition("byte level"))
    tokenizer = load_tokenizer(TokenizerConfig(encoder="tokenizers", **policy), path)
    prompt = split_prompt("tete", 0, tokenizer, 4, 1000)
    assert prompt.num_tokens == 4 + before
    assert prompt.full == ((tuple([tokenizer.bos_id] * before) + prompt.ids)[:4],)
    if boundary is not None:
        short = split_prompt("t", 0, tokenizer, 4, 1000)
        assert short.full[0][0] == getattr(tokenizer, boundary)
        assert tokenizer.bos_id not in short.full[0] or before
