"""The transformer of a check: its KV cache makes a prompt in chunks equal to the whole prompt."""

from __future__ import annotations

import torch

from transfer.check.shape import Shape
from transfer.check.transformer import Transformer

SHAPE = Shape(2, 16, 4, 2, 4, 4, 10, 4, "float32")
BLOCKS = [7, 2, 5]
CPU = torch.device("cpu")


def empty_cache() -> list[torch.Tensor]:
    return [torch.zeros(SHAPE.layer_shape) for _ in range(SHAPE.layers)]


def forward(model: Transformer, prompt: torch.Tensor, ends: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    cache, outputs, begin = empty_cache(), [], 0
    for end in ends:
        outputs.append(model.forward(prompt[begin:end], begin, BLOCKS, cache, lambda layer: None))
        begin = end
    return torch.cat(outputs), cache


def test_a_prompt_in_chunks_is_the_whole_prompt() -> None:
    model = Transformer(SHAPE, CPU)
    prompt = model.prompt(10, 1)
    assert prompt.shape == (10, SHAPE.hidden)
    whole, cache = forward(model, prompt, [10])
    chunked, chunked_cache = forward(model, prompt, SHAPE.chunks(10))
    torch.testing.assert_close(chunked, whole)
    torch.testing.assert_close(chunked_cache, cache)


def test_kv_lies_in_the_given_blocks_only_and_a_later_token_changes_no_earlier_one() -> None:
    model = Transformer(SHAPE, CPU)
    prompt = model.prompt(10, 1)
    whole, cache = forward(model, prompt, [10])
    for layer in cache:
        assert layer[BLOCKS[:2]].flatten(1).any(dim=1).all()
        assert layer[BLOCKS[2], :, :2].any()
        assert not layer[BLOCKS[2], :, 2:].any(), "behind the prompt's end"
        layer[BLOCKS] = 0
        assert not layer.any()
    other = prompt.clone()
    other[8:] += 1
    changed, _ = forward(model, other, [10])
    torch.testing.assert_close(changed[:8], whole[:8])
    assert not torch.allclose(changed[8:], whole[8:])


def test_a_layer_is_told_of_when_its_kv_is_in_the_cache() -> None:
    model, cache, seen = Transformer(SHAPE, CPU), empty_cache(), []

    def saved(layer: int) -> None:
        seen.append((layer, [bool(each.any()) for each in cache]))

    model.forward(model.prompt(4, 1), 0, BLOCKS, cache, saved)
    assert seen == [(0, [True, False]), (1, [True, True])]


def test_weights_and_prompts_follow_their_seeds() -> None:
    model, prompt = Transformer(SHAPE, CPU, seed=1), Transformer(SHAPE, CPU).prompt(10, 1)
    whole, _ = forward(model, prompt, [10])
    again, _ = forward(Transformer(SHAPE, CPU, seed=1), model.prompt(10, 1), [10])
    other, _ = forward(Transformer(SHAPE, CPU, seed=2), prompt, [10])
    assert torch.equal(again, whole)
    assert not torch.equal(other, whole)
    assert not torch.equal(model.prompt(10, 2), prompt)
