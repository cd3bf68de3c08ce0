"""Generation on models whose continuation is known: ragged prompts, stops, streaming, the cache's use."""

from __future__ import annotations

import pytest
import torch

from calm_scale.config.evaluation import GenerationConfig
from calm_scale.sampling.batch import SamplingError
from calm_scale.sampling.generate import generate
from calm_scale.sampling.prompts import complete_heads


def plain(**changes):
    return GenerationConfig(**{"algorithm": "plain", "max_new_tokens": 8, "num_candidates": 20, **changes})


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6, 7, 8, 13])
def test_prompt_of_any_length_is_continued_token_by_token(script, letters, length):
    """The alphabet goes on where the prompt stops, wherever that is in a patch."""
    model = script(26, 4)
    out = generate(model, letters, [list(range(length))], plain())
    assert out.completions[0].text == "".join(chr(97 + (length + i) % 26) for i in range(8))
    assert out.completions[0].finish == "length"
    assert out.completions[0].head == ("agreed" if length % 4 and length > 4 else "none")
    assert out.num_new_tokens == 8


def test_ragged_batch_equals_single_prompts(script, letters):
    model = script(26, 4)
    prompts = [[i % 26 for i in range(n)] for n in (9, 4, 30, 6, 17)]
    together = generate(model, letters, prompts, plain())
    alone = [generate(script(26, 4), letters, [p], plain()).completions[0] for p in prompts]
    assert [c.text for c in together.completions] == [c.text for c in alone]
    assert [c.index for c in together.completions] == [0, 1, 2, 3, 4]
    assert model.widths[0] == 1  # the shortest prompt's patches at once, the rest a position a step
    assert set(model.widths[1:]) == {1}


def test_a_step_costs_one_backbone_position(script, letters):
    model = script(26, 4)
    generate(model, letters, [[i % 26 for i in range(40)]], plain(max_new_tokens=32))
    assert model.widths == [10, 1, 1, 1, 1, 1, 1, 1]
    assert model.max_patches_asked == 18


def test_the_prompt_is_never_padded_in_the_middle(script, letters):
    model = script(26, 4)
    generate(model, letters, [list(range(6))], plain())
    fed = torch.cat(model.seen, 1).flatten().tolist()
    assert fed == list(range(len(fed)))


def test_text_prompt_gets_a_bos_and_short_ones_more_in_front(script, letters):
    model = script(28, 4)
    out = generate(model, letters, ["ab"], plain(max_new_tokens=4)).completions[0]
    assert model.seen[0].flatten().tolist() == [26, 26, 0, 1]
    assert (out.num_prompt_tokens, out.num_front_bos, out.text) == (3, 1, "cdef")


def test_end_token_inside_a_patch_ends_the_text(script, letters):
    out = generate(script(28, 4), letters, [[20, 21, 22, 23]], plain()).completions[0]
    assert (out.text, out.finish, out.token_ids) == ("yz", "eos", (24, 25))  # 26 is BOS: the next document


def test_limit_is_exact_inside_a_patch(script, letters):
    out = generate(script(26, 4), letters, [[0, 1, 2, 3]], plain(max_new_tokens=6)).completions[0]
    assert len(out.token_ids) == 6


def test_stop_string_across_patches(script, letters):
    out = generate(script(26, 4), letters, [[0, 1, 2, 3]], plain(stop=("ghi", "zz"))).completions[0]
    assert (out.text, out.finish) == ("ef", "stop")


def test_streamed_pieces_are_final_and_complete(script, letters):
    pieces: dict[int, list[str]] = {0: [], 1: []}
    out = generate(
        script(26, 4),
        letters,
        [[0, 1, 2, 3], [5, 6, 7, 8, 9]],
        plain(stop=("hx", "mn")),
        on_text=lambda index, text: pieces[index].append(text),
    )
    assert "".join(pieces[0]) == out.completions[0].text == "efghijkl"
    assert pieces[0] == ["efg", "hijkl"]  # 'h' may begin a stop string until 'i' follows
    assert "".join(pieces[1]) == out.completions[1].text == "kl"


def test_candidates_that_agree_are_chosen_in_proportion(law_model, generator):
    """P(patch | first token given), exact at T = 1: χ²-free check on a 2-token patch."""
    law = torch.tensor([0.4, 0.1, 0.05, 0.45], dtype=torch.float64)  # patches 00 01 10 11
    heads = complete_heads(law_model(2, 2), law.expand(20_000, 4), [[1]] * 20_000, 1.0, 30, 300, generator)
    assert heads.agreed.all()
    assert (heads.patches[:, 0] == 1).all()
    share = heads.patches[:, 1].double().mean()
    assert abs(share - 0.9) < 4 * (0.9 * 0.1 / 20_000) ** 0.5


def test_head_without_agreement_is_forced_and_told(script, letters):
    """A prompt the model would never write: the given tokens stand, and the result says so."""
    out = generate(script(26, 4), letters, [[0, 1, 2, 3, 4, 9]], plain(draw_budget=60)).completions[0]
    assert out.head == "forced"
    assert out.text == "ghijklmn"  # the candidate 4 5 6 7 agreed longest; 5 gave way to the given 9


@pytest.mark.parametrize("algorithm", ["exact", "batch"])
def test_a_head_chosen_at_a_lower_order_is_a_fallback(script, letters, algorithm):
    """Seven draws, slipped or not, of which six or more are equal only by luck: the head's order is below n = 6."""
    settings = plain(algorithm=algorithm, temperature=1 / 6, num_candidates=7, max_new_tokens=1)
    sure = generate(script(26, 4), letters, [list(range(6))], settings)
    assert (sure.completions[0].head, sure.num_heads, sure.num_fallbacks) == ("agreed", 1, 0)
    assert "Algorithm 2, N = 7" in sure.head_sampler
    torn = generate(script(26, 4, slip=0.5), letters, [list(range(6))], settings)
    assert (torn.completions[0].head, torn.num_patches, torn.num_fallbacks) == ("agreed", 1, 1)


def test_a_head_at_a_tiny_temperature_falls_back(script, letters):
    settings = plain(algorithm="batch", temperature=1e-30, max_new_tokens=1)
    out = generate(script(26, 4), letters, [list(range(6))], settings)
    assert (out.completions[0].head, out.num_fallbacks) == ("agreed", 1)


def test_a_forced_head_is_a_fallback(script, letters):
    out = generate(script(26, 4), letters, [[0, 1, 2, 3, 4, 9]], plain(draw_budget=60, max_new_tokens=1))
    assert (out.num_heads, out.num_forced_heads, out.num_fallbacks) == (1, 1, 1)
    tight = generate(script(26, 4), letters, [[0, 1, 2, 3, 4, 9]], plain(draw_budget=3, max_new_tokens=1))
    assert "N = 3 or more" in tight.head_sampler


def test_same_seed_same_text(script, letters):
    prompts = [list(range(n)) for n in (5, 8, 3 + 4)]
    texts = [
        [c.text for c in generate(script(26, 4, slip=0.5), letters, prompts, plain(seed=s)).completions]
        for s in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_time_is_split_and_adds_up(script, letters):
    out = generate(script(26, 4), letters, [[0, 1, 2, 3]], plain(algorithm="batch"))
    assert {"backbone", "head + decoder", "sampling", "text", "other"} <= set(out.seconds)
    assert out.total_seconds == pytest.approx(sum(out.seconds.values()))
    assert out.tokens_per_s > 0
    assert out.num_draws == 2 * 20
    assert "Algorithm 2" in out.sampler


def test_prompts_that_cannot_be_read(script, letters):
    with pytest.raises(SamplingError, match="prompt 0: token id 99"):
        generate(script(26, 4), letters, [[99]], plain())
    letters.before_document, letters.boundary_id = (), None
    with pytest.raises(SamplingError, match="less than one patch"):
        generate(script(26, 4), letters, ["ab"], plain())
    with pytest.raises(SamplingError, match="need 2 patches of 4, the model's context has 1"):
        generate(script(26, 4), letters, [[0, 1, 2, 3]], plain(), max_patches=1)
    assert generate(script(26, 4), letters, [[0, 1, 2, 3]], plain(), max_patches=2).num_new_tokens == 8
