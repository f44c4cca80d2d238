"""Memory and disk: worked by hand for a tiny shape, monotonic where expected, and close to measurements."""

import importlib.util
from pathlib import Path

import pytest
from transformers import LlamaConfig

from rlzoo import RunConfig, UserError
from rlzoo.gate.architecture import Architecture, find_architecture
from rlzoo.gate.devices import Devices, parse_devices
from rlzoo.gate.memory import PassShape, Sharding, activations, log_prob_bytes, micro_batch, trained_parameters
from rlzoo.gate.plan import Plan, Prompts


def llama(vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads):
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=32 if num_layers == 1 else 8192,
        tie_word_embeddings=True,
    )
    return Architecture(config)


# embedding 10*4 = 40; layer: q 4*4, k and v 4*2 each, o 4*4 = 48; MLP 3*4*6 = 72; norms 2*4 = 8; last norm 4: 172 in all
TINY = llama(10, 4, 6, 1, 2, 1)
CPU = Devices("CPU", 1, 10**12, is_cpu=True)
BATCH = PassShape(rows=2, length=8, response=5)  # 16 tokens
LARGE = llama(32000, 4096, 12288, 3, 32, 8)
ROLLOUT = ["rollout.num_prompts=4", "rollout.group_size=4", "rollout.max_new_tokens=5"]
ROLLOUT += ["learner.num_minibatches=2", "learner.max_tokens_per_micro_batch=16"]


def config(*overrides, clip="grpo", steps=3):
    return RunConfig.compose(clip=clip, overrides=[*ROLLOUT, *overrides], steps=steps)


def plan(*overrides, architecture=LARGE, devices="1xH100", processes=1, prompt=3, **more):
    named = parse_devices(devices) if isinstance(devices, str) else devices
    return Plan(config(*overrides, **more), architecture, named, Prompts(prompt, True), processes)


def learning(*overrides, **more):
    return sum(plan(*overrides, **more).memory.learning.values())


def states(held):
    parts = (
        "weights",
        "master weights",
        "optimizer states",
        "reference model",
        "communication buffers",
    )
    return tuple(held.states[part] for part in parts)


def test_states_are_worked_by_hand():
    # weights, master weights, moments, reference, buffers; in addition to all gradients the embedding's, of 40 numbers
    held = plan(architecture=TINY, devices=CPU).memory
    assert states(held) == (172 * 4, 0, 172 * 4 * 2, 0, 0)
    assert held.step["gradients"] == (172 + 40) * 4
    half = plan("model.dtype=bfloat16", "learner.kl_coef=0.1", architecture=TINY, devices=CPU).memory
    assert states(half) == (172 * 2, 172 * 4, 172 * 2 * 4, 172 * 2, 0)
    assert half.step["gradients"] == (172 + 40) * 4
    bare = plan("model.dtype=bfloat16", "learner.master_weights=false", architecture=TINY, devices=CPU).memory
    assert states(bare) == (172 * 2, 0, 172 * 2 * 2, 0, 0)
    assert bare.step["gradients"] == (172 + 40) * 2
    # each process has the weights' gradients, which are exchanged through buckets of the same size, and the masters'
    two = plan("model.dtype=bfloat16", architecture=TINY, devices="2xH100", processes=2).memory
    assert states(two) == (172 * 2, 172 * 4, 172 * 2 * 4, 0, 172 * 2)
    assert two.step["gradients"] == 172 * 6 + 40 * 4


def test_a_teacher_is_counted_in_its_own_size():
    # the shipped model is the teacher of a model of 172 parameters, in the float32 of its file or as the setting says
    number, teacher = find_architecture("embedded").num_parameters, ["model.reference=embedded"]
    held = plan(*teacher, architecture=TINY, clip="opd").memory
    assert states(held)[3] == number * 4
    assert states(plan(*teacher, "model.reference_dtype=bfloat16", architecture=TINY, clip="opd").memory)[3] == number * 2
    # offloaded, it is on the device only while it scores: then nothing but the states is
    away = plan(*teacher, "model.reference_offload=true", architecture=TINY, clip="opd").memory
    assert (states(away)[3], away.offloaded) == (0, number * 4)
    assert away.peak == max(sum(away.learning.values()), sum(away.sampling.values()), sum(away.states.values()) + number * 4)
    on_cpu = plan(*teacher, "model.reference_offload=true", architecture=TINY, clip="opd", devices=CPU).memory
    assert (states(on_cpu)[3], on_cpu.offloaded) == (number * 4, 0)


def test_a_critic_is_counted_worked_by_hand():
    # of 172 parameters, 48 are in the attention; weights, and moments and float32 copies of what is trained
    critic = ["clip.advantage=gae"]
    frozen = [*critic, "critic.frozen=[attn]"]
    held = plan(*critic, architecture=TINY, devices=CPU).memory
    assert held.states["critic"] == 172 * 4 + 172 * 8
    assert plan(*frozen, architecture=TINY, devices=CPU).memory.states["critic"] == 172 * 4 + 124 * 8
    half = plan(*frozen, "model.dtype=bfloat16", architecture=TINY, devices=CPU)
    assert half.memory.states["critic"] == 172 * 2 + 124 * 12
    # in two processes, DDP has a bucket for the gradients; FSDP2 divides everything
    assert plan(*frozen, architecture=TINY, devices="2xH100", processes=2).memory.states["critic"] == 172 * 4 + 124 * 12
    sharded = plan(*frozen, "launch.fsdp=true", architecture=TINY, devices="2xH100", processes=2)
    assert sharded.memory.states["critic"] == (172 * 4 + 124 * 8) / 2
    zero2 = plan(*frozen, "launch.deepspeed=zero2", architecture=TINY, devices="2xH100", processes=2)
    assert zero2.memory.states["critic"] == 172 * 4 + 124 * 12 / 2
    # its gradients are never held together with the model's, which may be those of a small adapter
    assert held.step == plan(architecture=TINY, devices=CPU).memory.step
    low_rank = plan(*critic, "learner.lora.rank=1", architecture=TINY, devices=CPU).memory
    assert low_rank.step["gradients"] == 172 * 4
    # a checkpoint has the critic as a model, and what is trained with its moments in float32
    other = plan("model.dtype=bfloat16", architecture=TINY, devices=CPU).disk
    assert half.disk["checkpoints"] - other["checkpoints"] == 172 * 2 + 124 * 12
    assert half.disk["rollouts"] > other["rollouts"]
    embedded = find_architecture("embedded").num_parameters
    other = plan(*critic, "critic.model=embedded", architecture=TINY, devices=CPU).memory
    assert other.states["critic"] == embedded * 12


def test_zero_shards_states_over_processes():
    # a full copy is 172 * 2 bytes in bfloat16; DeepSpeed adds a copy and both moments in float32, 172 * 12 bytes over 4
    two = plan("model.dtype=bfloat16", "launch.deepspeed=zero2", architecture=TINY, devices="4xH100", processes=4).memory
    assert (*states(two)[:3], two.step["gradients"]) == (344, 172, 344, 86 + 80)
    three = plan("model.dtype=bfloat16", "launch.deepspeed=zero3", architecture=TINY, devices="4xH100", processes=4).memory
    assert (*states(three)[:3], three.step["gradients"]) == (86, 172, 344, 86 + 80)
    off = ["model.dtype=bfloat16", "launch.deepspeed=zero3", "launch.offload=all"]
    away = plan(*off, architecture=TINY, devices="4xH100", processes=4).memory
    assert states(away)[:3] == (0, 0, 0)
    off = ["model.dtype=bfloat16", "launch.deepspeed=zero2", "launch.offload=optimizer"]
    away = plan(*off, architecture=TINY, devices="4xH100", processes=4).memory
    assert states(away)[:3] == (344, 0, 0)


def test_fsdp_shards_everything_without_a_second_copy_of_the_weights():
    # over 4 processes: float32 shards of 172 * 4 bytes and both moments; 44 gathered weights outside of the layer and 128 in
    # it, and the layer's float32 gradient, which is reduced
    sharded = ["launch.fsdp=true", "model.dtype=bfloat16"]
    half = plan(*sharded, architecture=TINY, devices="4xH100", processes=4).memory
    assert states(half) == (0, 172, 344, 0, (44 + 128) * 2 + 128 * 4)
    assert half.step["gradients"] == 172 + 40 * 4
    full = plan("launch.fsdp=true", architecture=TINY, devices="4xH100", processes=4).memory
    assert states(full) == (172, 0, 344, 0, (44 + 128) * 4 + 128 * 4)
    bare = plan(*sharded, "learner.master_weights=false", architecture=TINY, devices="4xH100", processes=4).memory
    assert (*states(bare)[:3], bare.step["gradients"]) == (86, 0, 172, 86 + 80)
    three = plan("model.dtype=bfloat16", "launch.deepspeed=zero3", architecture=TINY, devices="4xH100", processes=4).memory
    assert half.sampler == three.sampler  # the sampler has its own copy of the weights
    document = plan(*sharded, architecture=TINY, devices="4xH100", processes=4).as_dict()
    assert (document["zero_stage"], document["fsdp"]) == (0, True)


def test_moments_of_a_backward_pass_are_worked_by_hand():
    # 16 tokens in float32; the backward pass of the MLP holds three tensors of 6 numbers per token
    forward = TINY.forward(config(), 2, 8)
    at_head, at_last_layer = activations(TINY, config(), forward, 16)
    assert at_last_layer == at_head + 3 * 6 * 4 * 16
    # with checkpointing, a layer keeps its input, 4 * 4 * 16 = 256, and is recomputed
    less = config("learner.gradient_checkpointing=true")
    assert activations(TINY, less, forward, 16) == (256, 256 + at_head + 3 * 6 * 4 * 16)


def test_log_probs_take_one_chunk_of_logits():
    # 2 rows of 5 response tokens, 10 logits, 4 tensors
    assert log_prob_bytes(TINY, config(), BATCH, is_cpu=True) == 10 * 10 * 16
    long = PassShape(1, 21000, 20000)  # one chunk, however long the response
    assert log_prob_bytes(LARGE, config(), long, is_cpu=True) == (2**24 // 32000) * 32000 * 16
    assert log_prob_bytes(LARGE, config(), long, is_cpu=False) == (2**28 // 32000) * 32000 * 16


def test_a_large_model_s_micro_batches_are_smaller_on_a_cpu():
    null = config("learner.max_tokens_per_micro_batch=null", "rollout.num_prompts=1024")
    tokens = {
        (name, is_cpu): micro_batch(null, shape, 3, 1, is_cpu=is_cpu).tokens
        for name, shape in (
            ("tiny", TINY),
            ("SmolLM2", llama(49152, 576, 1536, 30, 9, 3)),
            ("1.7B", llama(1000, 2048, 64, 28, 16, 8)),
        )
        for is_cpu in (True, False)
    }
    # rows of 8; 2^24 / (30 x 576) = 970; 28 x 2048 = 57344 leaves 292, below the minimum
    assert tokens == {
        ("tiny", True): 3072,
        ("tiny", False): 16384,
        ("SmolLM2", True): 968,
        ("SmolLM2", False): 16384,
        ("1.7B", True): 512,
        ("1.7B", False): 16384,
    }


def test_micro_batches_are_cut_as_the_learner_cuts_them():
    # 16 responses in 2 optimizer steps: 8 rows of 3 + 5 tokens, 16 tokens at once: 2 rows, 4 times
    assert micro_batch(config(), TINY, 3, 1) == PassShape(2, 8, 5)
    # 2 processes have 4 rows each; 24 tokens at once: 3 rows
    assert micro_batch(config("learner.max_tokens_per_micro_batch=24"), TINY, 3, 2) == PassShape(3, 8, 5)
    # a row of 8 is processed alone if 10 tokens are allowed
    assert micro_batch(config("learner.max_tokens_per_micro_batch=10"), TINY, 3, 1) == PassShape(1, 8, 5)


EPISODES = ["task.name=guess", "rollout.max_turns=3", "rollout.max_turn_tokens=2", "rollout.max_observation_tokens=4"]
EPISODES += ["learner.max_tokens_per_micro_batch=32"]


def test_environment_tokens_are_part_of_a_row():
    # a prompt of 3, 5 model tokens, and 4 environment tokens between its three turns: 3 + 5 + 2 * 4 = 16
    assert micro_batch(config(*EPISODES), TINY, 3, 1) == PassShape(2, 16, 5)
    # in three turns of one token, the model writes three: 3 + 3 + 8
    assert micro_batch(config(*EPISODES, "rollout.max_turn_tokens=1"), TINY, 3, 1) == PassShape(2, 14, 3)
    # without an environment, a response contains only the model's tokens
    assert micro_batch(config(*EPISODES[1:]), TINY, 3, 1) == PassShape(4, 8, 5)


def test_an_episode_ends_at_the_context_limit():
    flood = [*EPISODES, "rollout.max_observation_tokens=1024"]
    assert micro_batch(config(*flood), TINY, 3, 1) == PassShape(1, 32, 5)
    vllm = ["rollout.engine=vllm", "rollout.vllm.max_model_len=20"]
    assert micro_batch(config(*flood, *vllm), TINY, 3, 1) == PassShape(1, 20, 5)
    assert micro_batch(config(*flood), None, 3, 1) == PassShape(1, 3 + 5 + 2 * 1024, 5)


def test_the_memory_and_disk_of_episodes_are_worked_by_hand():
    here, there = (plan(*settings, "rollout.graphs=off", architecture=TINY) for settings in (EPISODES, ()))
    # a token's keys and values take 2 * 2 * 4 bytes, and each of 16 rows has 8 tokens more
    assert here.memory.sampler - there.memory.sampler == 16 * 8 * 16
    # 16 ids; 5 tokens with 3 log-probs and 5 bytes of text; after the prompt 13 tokens have the number of their turn and
    # are in the list of turns; 8 observed ones are in the transcript; and three turns
    disk = plan(*EPISODES, architecture=TINY, devices=CPU).disk
    assert disk["rollouts"] == 3 * 16 * (16 * 8 + 5 * (3 * 4 + 5) + 13 * (8 + 5) + 8 * 5 + 3 * 128)


def test_disk_is_worked_by_hand():
    # 3 steps of 16 responses: 8 ids of 8 bytes; 5 tokens with 3 log-probs of 4 bytes and 5 of text
    small = plan(architecture=TINY, devices=CPU).disk
    assert small["rollouts"] == 3 * 16 * (8 * 8 + 5 * (3 * 4 + 5))
    truncated = plan("rollout.top_k=7", architecture=TINY, devices=CPU).disk
    assert truncated["rollouts"] - small["rollouts"] == 3 * 16 * 5 * (7 + 1) * 4  # 7 ids and their number for each token
    # the model, and for resuming: parameters and two moments
    assert small["checkpoints"] == 172 * 4 * 4
    kept = plan("checkpoint.every=1", architecture=TINY, devices=CPU).disk
    assert kept["checkpoints"] == 3 * 172 * 4 * 4  # two are kept, and the third is written before the first is removed


def test_disk_of_a_checkpoint_with_deepspeed_is_worked_by_hand():
    # bfloat16: the model twice, a copy and both moments in float32
    disk = plan("model.dtype=bfloat16", "launch.deepspeed=zero3", architecture=TINY, devices=CPU, processes=2).disk
    assert disk["checkpoints"] == 172 * (2 + 2 + 12)


@pytest.mark.parametrize(
    "less",
    [
        ["learner.gradient_checkpointing=true"],
        ["learner.lora.rank=16"],
        ["learner.lora.rank=16", "learner.lora.target=q_proj"],
    ],
)
def test_memory_saving_settings_reduce_the_planned_memory(less):
    base = ["model.dtype=bfloat16", "rollout.max_new_tokens=2000", "learner.max_tokens_per_micro_batch=4096"]
    assert learning(*base, *less) < learning(*base)


def test_a_low_rank_update_has_its_own_parameters():
    # rank 2: q 2*(4+4), k and v 2*(4+2) each, o 2*(4+4), gate and up 2*(4+6) each, down 2*(6+4)
    assert trained_parameters(TINY, config("learner.lora.rank=2")) == 16 + 24 + 16 + 40 + 20
    assert trained_parameters(TINY, config("learner.lora.rank=2", "learner.lora.target=q_proj")) == 16
    assert trained_parameters(TINY, config("learner.lora.rank=2", "learner.lora.target=[q_proj,down_proj]")) == 16 + 20
    assert trained_parameters(TINY, config("learner.lora.rank=2", r"learner.lora.target=.*\.(q_proj|down_proj)")) == 16 + 20


def test_vllm_reserves_its_memory_and_releases_it_in_sleep_mode():
    asleep = plan("rollout.engine=vllm", "rollout.vllm.gpu_memory_utilization=0.5").memory
    assert asleep.sampler == 40e9
    awake = plan("rollout.engine=vllm", "rollout.vllm.gpu_memory_utilization=0.5", "rollout.vllm.sleep=false").memory
    assert sum(awake.learning.values()) == sum(asleep.learning.values()) + 40e9
    assert awake.sampling == asleep.sampling == {**asleep.states, "sampler": 40e9}
    assert plan("rollout.engine=vllm", "rollout.vllm.server=http://127.0.0.1:8000").memory.sampler == 0


def test_generate_under_zero_3_has_a_copy_of_the_weights():
    two = plan("launch.deepspeed=zero2", devices="4xH100", processes=4).memory
    three = plan("launch.deepspeed=zero3", devices="4xH100", processes=4).memory
    assert three.sampler - two.sampler == LARGE.num_parameters * 4


def test_sampling_ahead_needs_separate_weights_and_runs_concurrently():
    here, ahead, queue = (plan(f"rollout.max_staleness={k}", architecture=TINY, devices=CPU).memory for k in (0, 1, 3))
    assert ahead.sampler - here.sampler == 172 * 4
    assert ahead.learning == {**here.learning, "sampler": ahead.sampler}
    assert queue.sampler - here.sampler == 3 * 172 * 4  # two batches wait with other weights, in the host's memory
    on_device = [plan(f"rollout.max_staleness={k}", architecture=TINY).memory.sampler for k in (1, 3)]
    assert on_device[0] == on_device[1]


def test_a_cache_for_graphs_has_a_multiple_of_256_columns():
    # 8 tokens in a row, whose keys and values take 2 * 2 * 4 bytes each
    graphs, plain = (plan(f"rollout.graphs={value}", architecture=TINY).memory.sampler for value in ("auto", "off"))
    assert graphs - plain == 16 * (256 - 8) * 16
    on_cpu = [plan(f"rollout.graphs={value}", architecture=TINY, devices=CPU).memory.sampler for value in ("auto", "off")]
    assert on_cpu[0] == on_cpu[1]


def test_sampling_under_autocast_holds_copies_of_the_layers():
    # in bfloat16, as are the values in the cache
    dtypes = ("learner.autocast=bfloat16", "model.dtype=bfloat16")
    cast, cache = (plan(dtype, "rollout.graphs=off").memory.sampler for dtype in dtypes)
    assert cast - cache == pytest.approx(2 * 3 * LARGE.layer_parameters, rel=0.01)


def test_parts_add_up_to_the_peak():
    held = plan().memory
    document = plan().as_dict()["memory_bytes"]
    assert document["learner"].pop("total") == pytest.approx(sum(document["learner"].values()))
    assert document["sampling"].pop("total") == pytest.approx(sum(document["sampling"].values()))
    assert held.peak == max(sum(held.learning.values()), sum(held.sampling.values()))


def test_a_deepspeed_config_file_is_read(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": "auto"}}')
    assert Sharding.of(config(f"launch.deepspeed={file}").launch, 4) == Sharding(4, 3, offloads_optimizer=True)
    file.write_text('{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}, "offload_optimizer": null}}')
    assert Sharding.of(config(f"launch.deepspeed={file}").launch, 4).offloads_weights
    file.write_text("{}")
    assert Sharding.of(config(f"launch.deepspeed={file}").launch, 4).stage == 0  # as DeepSpeed interprets it
    with pytest.raises(UserError, match="no such file"):
        Sharding.of(config("launch.deepspeed=zero4").launch, 4)


def test_devices_are_parsed_from_a_string():
    assert parse_devices("8xh100") == Devices("H100", 8, 80 * 10**9)
    assert parse_devices("2x24GB") == Devices("24 GB", 2, 24 * 10**9)
    for wrong in ("8", "xH100", "0xH100", "8xH", "8x24", "8xH1O0", "2x.GB"):
        with pytest.raises(UserError, match="--devices"):
            parse_devices(wrong)
    with pytest.raises(UserError, match="did you mean 'H100'"):
        parse_devices("8xH1O0")


@pytest.mark.long
def test_the_planned_peak_is_within_a_fifth_of_the_measured_one():
    script = Path(__file__).resolve().parents[2] / "examples" / "lab" / "measure_planner.py"
    spec = importlib.util.spec_from_file_location("measure_planner", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, changes in module.QUICK.items():
        result = module.measure(**changes)
        assert result["predicted"] == pytest.approx(result["measured"], rel=0.2), name
