"""The numbers of the demo and of the soak."""

import asyncio
import io
import math
import os
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from kvtide.bench.load import LONGEST, LONGEST_ANSWER, LONGEST_END, Load
from kvtide.bench.memory import WARM_UP_S, growth, proportional_set_size, sample
from kvtide.bench.soak import soak_config
from kvtide.chat_client import Answer
from kvtide.demo.figures import Phase, percentile, summarize, table
from kvtide.demo.plan import QUESTIONS, TURNS, demo_config, documents, opening
from kvtide.oracle import Verdict
from shared.config import Config, Model


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A model folder of SmolLM2's shape."""
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
    }
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(shape))
    return Config(model=Model(path=str(tmp_path), name="model"))


def answer(ttft_s: float, prompt: int, device: int = 0, host: int = 0, storage: int = 0) -> Answer:
    return Answer(
        ttft_s=ttft_s,
        prompt_tokens=prompt,
        device_tokens=device,
        host_tokens=host,
        storage_tokens=storage,
        finish="stop",
    )


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.5, 2.5), (0.95, 3.85), (1.0, 4.0)])
def test_percentiles_are_interpolated(share: float, value: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], share) == pytest.approx(value)


def test_a_percentile_of_nothing_is_no_number() -> None:
    assert math.isnan(percentile([], 0.5))


def test_the_summary_counts_hits_of_the_tiered_phases() -> None:
    tiered = Phase("three tiers", [answer(1.0, 100), answer(0.2, 130, 64, 32), answer(0.2, 130, 0, 32, 64)])
    restarted = Phase("restarted", [answer(0.3, 160, storage=128)])
    result = summarize(tiered, restarted, [0.2, 0.2], [0.5, 0.7], 1, Verdict(40, 0, 1e-5, 1e-5), 12.34)
    assert msgspec.to_builtins(result) == {
        "sessions": 1,
        "requests": 4,
        "prompt_tokens": 520,
        "device_hit_tokens": 64,
        "host_hit_tokens": 64,
        "storage_hit_tokens": 192,
        "after_restart_storage_hit_tokens": 128,
        "tokens_checked": 40,
        "tokens_wrong": 0,
        "ttft_speedup_p50": 3.0,
        "wall_s": 12.3,
    }


def test_the_table_shows_what_was_computed() -> None:
    console = Console(width=160, file=io.StringIO())
    with console.capture() as captured:
        console.print(table([Phase("three tiers", [answer(1.0, 1000), answer(0.5, 1100, 500, 300, 200)])]))
    text = captured.get()
    assert "three tiers" in text
    assert "2,100" in text
    assert "1,100" in text
    assert "0.75 s" in text


def test_every_session_has_a_text_and_a_question_for_each_turn() -> None:
    texts = documents()
    assert len(texts) == 8
    assert len(QUESTIONS) == TURNS + 1
    system, user = opening(texts[0])
    assert (system["role"], user["role"]) == ("system", "user")
    assert user["content"].startswith("# ")
    assert user["content"].endswith(QUESTIONS[0])
    assert len({text.text for text in texts}) == len(texts)


def test_the_demo_differs_between_its_phases_in_the_host_tier_only(config: Config, tmp_path: Path) -> None:
    tiered, device_only = (demo_config(config, tmp_path, tiered) for tiered in (True, False))
    assert tiered.cache.host_bytes > 0
    assert device_only.cache.host_bytes == 0
    assert msgspec.structs.replace(device_only, cache=tiered.cache) == tiered
    assert tiered.model.dtype == "float32"


def test_no_request_of_the_soak_is_larger_than_a_pool(config: Config, tmp_path: Path) -> None:
    load = Load(seed=1)
    soak = soak_config(config, tmp_path, load.live_tokens)
    assert LONGEST + LONGEST_END + LONGEST_ANSWER < soak.cache.device_tokens <= load.live_tokens // 10


def test_the_soak_of_a_seed_is_always_the_same() -> None:
    assert Load(seed=3)._families == Load(seed=3)._families != Load(seed=4)._families


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [([100] * 60, 0.0), ([*range(100, 160)], 0.18), ([200] * 15 + [100] * 45, 0.0), ([100] * 59 + [900], 0.0)],
)
def test_growth_compares_the_windows_after_the_warm_up(sizes: list[int], expected: float) -> None:
    samples = [(float(at), size) for at, size in enumerate(sizes)]
    assert WARM_UP_S == 15.0
    assert growth(samples) == pytest.approx(expected, abs=0.03)


def test_growth_of_a_short_run_is_none() -> None:
    assert growth([(1.0, 100), (14.0, 900)]) == 0.0


async def test_memory_is_sampled_until_cancelled() -> None:
    samples: list[tuple[float, int]] = []
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(sample(lambda: [os.getpid()], samples), 0.3)
    assert samples[0][1] > 2**20
    assert proportional_set_size([2**22 + 1]) == 0
