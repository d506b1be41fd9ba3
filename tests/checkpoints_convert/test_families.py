import dataclasses
import json

import numpy as np
import pytest

from checkpoints_convert.families import FAMILIES, find_family
from checkpoints_convert.synthetic import stored_shapes
from tests.checkpoints_convert.folders import CONFIGS, config_of, per_expert_names
from wmtp_jax.config import ModelConfig, RopeScaling, fold_segments
from wmtp_jax.errors import UserError
from wmtp_jax.presets import model_config, read_preset

LETTERS = {"mamba": "M", "moe": "E", "attention": "*"}

# Fields of the published Qwen3.5-35B-A3B.
PUBLISHED_35B = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "tie_word_embeddings": False,
    "text_config": dict(
        vocab_size=248320, hidden_size=2048, num_hidden_layers=40, num_attention_heads=16, num_key_value_heads=2,
        head_dim=256, linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
        linear_value_head_dim=128, linear_conv_kernel_dim=4, full_attention_interval=4, num_experts=256,
        num_experts_per_tok=8, moe_intermediate_size=512, shared_expert_intermediate_size=512,
        max_position_embeddings=262144, mtp_num_hidden_layers=1, eos_token_id=248044,
        rope_parameters=dict(
            rope_type="default", rope_theta=10000000, partial_rotary_factor=0.25, mrope_interleaved=True,
            mrope_section=[11, 11, 10],
        ),
    ),
}  # fmt: skip
NESTED = frozenset({"model.language_model.embed_tokens.weight"})


def parse(config: dict, *, mtp_in_files: bool = False) -> ModelConfig:
    return find_family(config).parse_config(config, mtp_in_files=mtp_in_files)


def test_names_and_shapes_are_those_of_the_published_35b():
    shapes, prefix = stored_shapes(PUBLISHED_35B, NESTED), "model.language_model."
    expected = {
        f"{prefix}embed_tokens.weight": (248320, 2048),
        f"{prefix}norm.weight": (2048,),
        "lm_head.weight": (248320, 2048),
        f"{prefix}layers.0.linear_attn.in_proj_qkv.weight": (8192, 2048),
        f"{prefix}layers.0.linear_attn.in_proj_z.weight": (4096, 2048),
        f"{prefix}layers.1.linear_attn.in_proj_a.weight": (32, 2048),
        f"{prefix}layers.2.linear_attn.conv1d.weight": (8192, 1, 4),
        f"{prefix}layers.2.linear_attn.A_log": (32,),
        f"{prefix}layers.2.linear_attn.norm.weight": (128,),
        f"{prefix}layers.2.linear_attn.out_proj.weight": (2048, 4096),
        f"{prefix}layers.3.self_attn.q_proj.weight": (8192, 2048),
        f"{prefix}layers.39.self_attn.v_proj.weight": (512, 2048),
        f"{prefix}layers.39.self_attn.q_norm.weight": (256,),
        f"{prefix}layers.39.self_attn.o_proj.weight": (2048, 4096),
        f"{prefix}layers.0.mlp.gate.weight": (256, 2048),
        f"{prefix}layers.0.mlp.experts.gate_up_proj": (256, 1024, 2048),
        f"{prefix}layers.0.mlp.experts.down_proj": (256, 2048, 512),
        f"{prefix}layers.0.mlp.shared_expert.down_proj.weight": (2048, 512),
        f"{prefix}layers.0.mlp.shared_expert_gate.weight": (1, 2048),
        "mtp.fc.weight": (2048, 4096),
        "mtp.pre_fc_norm_hidden.weight": (2048,),
        "mtp.layers.0.self_attn.k_proj.weight": (512, 2048),
    }
    assert {name: shapes.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("config", "names", "count"),
    [
        (CONFIGS["dense"], frozenset(), 15),
        (PUBLISHED_35B, NESTED, 19),
        (PUBLISHED_35B, NESTED | per_expert_names(backbone=False), 785),
        (config_of("next", num_experts=512), per_expert_names(), 1553),
    ],
    ids=["dense", "packed", "256 experts", "512 experts"],
)
def test_draft_heads_have_as_many_tensors_as_published(config, names, count):
    assert sum(name.startswith("mtp.") for name in stored_shapes(config, names)) == count


# Fields of the published Nemotron-3-Super-120B-A12B.
PUBLISHED_NEMOTRON = dict(
    architectures=["NemotronHForCausalLM"], vocab_size=131072, hidden_size=4096, num_hidden_layers=88,
    hybrid_override_pattern="MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
    num_attention_heads=32, num_key_value_heads=2, head_dim=128, attention_bias=False, rope_theta=10000,
    partial_rotary_factor=1.0, mamba_num_heads=128, mamba_head_dim=64, ssm_state_size=128, n_groups=8, conv_kernel=4,
    use_conv_bias=True, use_bias=False, mamba_hidden_act="silu", time_step_min=0.001, n_routed_experts=512,
    num_experts_per_tok=22, moe_intermediate_size=2688, moe_latent_size=1024, n_shared_experts=1,
    moe_shared_expert_intermediate_size=5376, routed_scaling_factor=5.0, norm_topk_prob=True, n_group=1, topk_group=1,
    mlp_hidden_act="relu2", layer_norm_epsilon=1e-5, tie_word_embeddings=False, max_position_embeddings=262144,
    num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*E", eos_token_id=[2, 11],
)  # fmt: skip


def test_the_preset_of_nemotron_is_what_its_config_says():
    preset = model_config(read_preset("nemotron_3_super"), "nemotron_3_super")
    # The model card says up to 1M.
    assert dataclasses.replace(parse(PUBLISHED_NEMOTRON), max_positions=2**20) == preset
    assert "".join(LETTERS[kind] for kind in preset.blocks) == PUBLISHED_NEMOTRON["hybrid_override_pattern"]
    # What is compiled: 27 blocks in place of 88.
    assert [len(segment.pattern) for segment in preset.segments] == [2, 9, 11, 3, 2]


def test_heads_of_older_nemotrons_are_as_wide_as_they_say():
    older = config_of("nemotron", head_dim=None, attention_head_dim=10)
    assert parse(older) == parse(CONFIGS["nemotron"])


def test_names_and_shapes_are_those_of_the_published_nemotron():
    shapes = stored_shapes(PUBLISHED_NEMOTRON)
    expected = {
        "backbone.embeddings.weight": (131072, 4096),
        "lm_head.weight": (131072, 4096),
        "backbone.norm_f.weight": (4096,),
        "backbone.layers.87.norm.weight": (4096,),
        "backbone.layers.0.mixer.in_proj.weight": (18560, 4096),
        "backbone.layers.0.mixer.conv1d.weight": (10240, 1, 4),
        "backbone.layers.2.mixer.conv1d.bias": (10240,),
        "backbone.layers.4.mixer.A_log": (128,),
        "backbone.layers.4.mixer.D": (128,),
        "backbone.layers.6.mixer.dt_bias": (128,),
        "backbone.layers.6.mixer.norm.weight": (8192,),
        "backbone.layers.6.mixer.out_proj.weight": (4096, 8192),
        "backbone.layers.7.mixer.q_proj.weight": (4096, 4096),
        "backbone.layers.78.mixer.k_proj.weight": (256, 4096),
        "backbone.layers.1.mixer.gate.weight": (512, 4096),
        "backbone.layers.1.mixer.gate.e_score_correction_bias": (512,),
        "backbone.layers.1.mixer.fc1_latent_proj.weight": (1024, 4096),
        "backbone.layers.1.mixer.fc2_latent_proj.weight": (4096, 1024),
        "backbone.layers.87.mixer.experts.511.up_proj.weight": (2688, 1024),
        "backbone.layers.87.mixer.experts.511.down_proj.weight": (1024, 2688),
        "backbone.layers.87.mixer.shared_experts.up_proj.weight": (5376, 4096),
        "mtp.layers.0.eh_proj.weight": (4096, 8192),
        "mtp.layers.0.enorm.weight": (4096,),
        "mtp.layers.0.mixer.o_proj.weight": (4096, 4096),
        "mtp.layers.1.final_layernorm.weight": (4096,),
        "mtp.layers.1.mixer.experts.0.up_proj.weight": (2688, 1024),
    }
    assert {name: shapes.get(name) for name in expected} == expected


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 13, 21, 29])
def test_segments_hold_every_block_in_order(length):
    letters = np.random.default_rng(length).choice(list("ME*"), length)
    blocks = [kind for letter in letters for kind in LETTERS if LETTERS[kind] == letter]
    segments = fold_segments(blocks)
    assert [kind for segment in segments for kind in segment.blocks] == blocks


def test_a_repeated_period_is_one_segment():
    (segment,) = fold_segments(["mamba", "moe", "mamba", "attention", "moe"] * 7)
    assert (len(segment.pattern), segment.num_periods) == (5, 7)


def test_both_spellings_of_nemotrons_layers_are_read():
    words = ["mamba", "moe", "mamba", "attention", "moe", "mamba", "moe", "mlp"]
    new = ["linear_attention" if w == "mamba" else "full_attention" if w == "attention" else w for w in words]
    for names in (words, new):
        spelled = config_of("nemotron", hybrid_override_pattern=None, layers_block_type=names)
        assert parse(spelled) == parse(CONFIGS["nemotron"])


def test_nested_and_flat_configs_describe_the_same_model():
    nested = CONFIGS["moe"]
    flat = {**nested["text_config"], "architectures": ["Qwen3_5MoeForCausalLM"], "tie_word_embeddings": False}
    assert parse(nested) == parse(flat)


def test_layer_types_and_the_interval_say_the_same():
    kinds = ["linear_attention", "full_attention"] * 2
    explicit = parse(config_of("dense", layer_types=kinds))
    assert explicit == parse(config_of("dense", full_attention_interval=2))
    assert explicit.pattern == ("delta", "dense", "attention", "dense")
    assert explicit.num_periods == 2


def test_sparse_step_and_dense_layers_place_the_experts():
    config = parse(config_of("next", mlp_only_layers=[3], decoder_sparse_step=2))
    assert config.blocks[1::2] == ("dense", "moe", "dense", "dense")


@pytest.mark.parametrize("kind", ["yarn", "llama3", "linear"])
def test_both_rope_spellings_describe_the_same_positions(kind):
    own = {"factor": 4.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0, "high_freq_factor": 3.0}
    new = config_of("llama", rope_parameters={"rope_type": kind, "rope_theta": 5e5, **own})
    old = config_of("llama", rope_scaling={"type": kind, **own}, rope_theta=5e5)
    rope = parse(new).attention.rope
    assert rope == parse(old).attention.rope
    assert rope is not None
    assert rope.theta == 5e5
    assert isinstance(rope.scaling, RopeScaling)
    assert (rope.scaling.kind, rope.scaling.factor) == (kind, 4.0)
    assert rope.scaling.original_max_positions == (0 if kind == "linear" else 64)


def test_yarn_without_its_own_length_takes_the_configs():
    rope = parse(config_of("llama", rope_scaling={"rope_type": "yarn", "factor": 2.0})).attention.rope
    assert rope is not None
    assert rope.scaling is not None
    assert rope.scaling.original_max_positions == 256


@pytest.mark.parametrize(
    ("outer", "inner", "tied"), [(True, False, True), (False, True, False), (None, True, True), (None, None, False)]
)
def test_the_outermost_level_that_speaks_decides_on_tying(outer, inner, tied):
    config = config_of("moe", tie_word_embeddings=inner) if inner is not None else config_of("moe")
    config["tie_word_embeddings"] = outer
    assert parse(config).tie_embeddings is tied


def test_next_takes_its_draft_head_from_the_files():
    config = config_of("next", mtp_num_hidden_layers=None)
    assert parse(config, mtp_in_files=True).mtp_pattern == ("attention", "moe")
    assert not parse(config, mtp_in_files=False).has_mtp


def test_biases_are_where_each_family_has_them():
    qwen2, llama = parse(CONFIGS["qwen2"]), parse(CONFIGS["llama"])
    assert (qwen2.attention.qkv_bias, qwen2.attention.out_bias) == (True, False)
    assert (llama.attention.qkv_bias, llama.attention.out_bias) == (True, True)
    assert llama.dense is not None
    assert llama.dense.bias


def test_an_unused_window_is_no_obstacle():
    assert parse(config_of("qwen2", use_sliding_window=False, sliding_window=4096)).num_periods == 3
    assert parse(config_of("qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=3)).num_periods == 3


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("dense", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ("moe", {"quantization_config": {"quant_method": "nvfp4"}}, "nvfp4"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, "use_sliding_window"),
        ("llama", {"sliding_window": 4096}, "sliding_window=4096"),
        ("llama", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types[1]"),
        ("dense", {"layer_types": ["full_attention"]}, "layer_types"),
        ("dense", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("llama", {"rope_scaling": {"type": "longrope", "factor": 2}}, "rope_type='longrope'"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters"),
        ("dense", {"mtp_num_hidden_layers": 3}, "mtp_num_hidden_layers=3"),
        ("dense", {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings"),
        ("dense", {"hidden_size": None}, "hidden_size is missing"),
        ("nemotron", {"hybrid_override_pattern": "MEX*"}, "a layer 'X'"),
        ("nemotron", {"hybrid_override_pattern": None}, "hybrid_override_pattern or layers_block_type"),
        (
            "nemotron",
            {"hybrid_override_pattern": None, "layers_block_type": ["moe", "x"]},
            "layers_block_type has a layer",
        ),
        ("nemotron", {"hybrid_override_pattern": ""}, "hybrid_override_pattern or layers_block_type"),
        ("nemotron", {"hybrid_override_pattern": 7}, "hybrid_override_pattern or layers_block_type"),
        ("nemotron", {"mtp_hybrid_override_pattern": "ME"}, "mtp_hybrid_override_pattern"),
        ("nemotron", {"mtp_hybrid_override_pattern": "E*"}, "mtp_pattern"),
        ("nemotron", {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers=2"),
        ("nemotron", {"n_group": 4}, "n_group=4"),
        ("nemotron", {"n_groups": 3}, "n_groups=3 does not divide mamba_num_heads=4"),
        ("nemotron", {"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu'"),
        ("nemotron", {"attention_bias": True}, "attention_bias=True"),
        ("nemotron", {"mlp_bias": True}, "mlp_bias=true"),
        ("nemotron", {"ssm_state_size": None}, "ssm_state_size is missing"),
        ("nemotron", {"sliding_window": 64}, "sliding_window=64"),
        ("dense", {"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide num_attention_heads=4"),
        ("llama", {"num_attention_heads": 5, "num_key_value_heads": 5}, "num_attention_heads=5 does not divide"),
        ("dense", {"vocab_size": "61"}, "vocab_size='61'"),
        ("moe", {"num_experts_per_tok": 9}, "num_experts_per_tok=9"),
        ("dense", {"eos_token_id": {"id": 1}}, "eos_token_id"),
    ],
)
def test_what_no_model_here_computes_is_refused_by_name(kind, changes, named):
    with pytest.raises(UserError) as error:
        parse(config_of(kind, **changes))
    assert named in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("named", [{"architectures": ["GPT2LMHeadModel"]}, {"model_type": "gpt2"}, {}])
def test_an_unknown_architecture_is_told_which_ones_are_known(named):
    with pytest.raises(UserError) as error:
        find_family(named)
    message = str(error.value)
    assert all(name in message for family in FAMILIES for name in family.architectures)
    assert "\n" not in message


def test_the_model_type_decides_where_no_architecture_is_named():
    config = json.loads(json.dumps(CONFIGS["qwen2"]))
    del config["architectures"]
    assert parse(config) == parse(CONFIGS["qwen2"])
