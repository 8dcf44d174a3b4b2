"""Checkpoints: keys, dtypes and configs that other engines read; round trips; corruption; conversion shard by shard."""

import json
import os
import shutil
import struct

import cases
import pytest
import tiny_models
import torch
from cases import DEVICE

import mxmoe
from mxmoe import checkpoint, serving
from mxmoe.cli import main
from mxmoe.reference import quantize

safetensors = pytest.importorskip("safetensors")
from safetensors.torch import load_file, save_file  # noqa: E402

LOADABLE = ("qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "nemotron_h", "glm4_moe")


def model_of(family, *, dtype=torch.float32, seed=0):
    return tiny_models.tiny(family, dtype=dtype, seed=seed).eval().to(DEVICE)


def logits(model):
    with torch.no_grad():
        return model(tiny_models.token_ids().to(next(model.parameters()).device)).logits.float()


def quantized(family="qwen3_moe", **kwargs):
    model = model_of(family, **kwargs)
    mxmoe.quantize_experts(model, progress=False, measure=False)
    return model


def tensors_of(path):
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= load_file(file)
    return found


# --- what is written -------------------------------------------------------------------------------------------------
def test_keys_and_dtypes_of_both_formats(tmp_path):
    """The list of ecosystem formats, key by key; scales are plain and the bytes are the same in both."""
    model = quantized()
    written = {}
    for format in checkpoint.FORMATS:
        mxmoe.save_checkpoint(model, tmp_path / format, format)
        written[format] = tensors_of(tmp_path / format)
    hf, ct = written["hf"], written["compressed-tensors"]
    for layer in range(2):
        for e in range(8):
            for name, shape in (("gate_proj", (32, 64)), ("up_proj", (32, 64)), ("down_proj", (64, 32))):
                key = f"model.layers.{layer}.mlp.experts.{e}.{name}"
                for tensors, suffix, dtype in (
                    (hf, "weight_scale_inv", torch.float8_e8m0fnu),
                    (ct, "weight_scale", torch.uint8),
                ):
                    weight, scale = tensors[f"{key}.weight"], tensors[f"{key}.{suffix}"]
                    assert (weight.dtype, tuple(weight.shape)) == (torch.float8_e4m3fn, shape)
                    assert (scale.dtype, tuple(scale.shape)) == (dtype, (shape[0], shape[1] // 32))
                cases.assert_bitwise(hf[f"{key}.weight"], ct[f"{key}.weight"])
                cases.assert_bitwise(hf[f"{key}.weight_scale_inv"].view(torch.uint8), ct[f"{key}.weight_scale"])
    experts = {k for k in hf if ".experts." in k}
    assert len(experts) == 2 * 8 * 3 * 2
    rest = {k for k in tiny_models.tiny("qwen3_moe").state_dict() if ".experts." not in k}
    assert hf.keys() - experts == rest
    assert {k.replace("_inv", "") for k in hf} == ct.keys()


def test_configs(tmp_path):
    model = quantized()
    for format in checkpoint.FORMATS:
        mxmoe.save_checkpoint(model, tmp_path / format, format)
    hf, ct = (json.loads((tmp_path / f / "config.json").read_text()) for f in checkpoint.FORMATS)
    kept = hf["quantization_config"].pop("modules_to_not_convert")
    assert hf["quantization_config"] == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [1, 32],
        "scale_fmt": "ue8m0",
    }
    linears = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    assert set(linears) <= set(kept)
    assert "model.layers.0.mlp.gate" in kept  # the router, whatever class it has
    assert not any("experts" in name for name in kept)
    quantization = ct["quantization_config"]
    assert quantization["quant_method"] == "compressed-tensors"
    assert quantization["format"] == "mxfp8-quantized"
    group = quantization["config_groups"]["group_0"]
    assert group["weights"]["scale_dtype"] == "torch.uint8"
    assert (group["weights"]["dynamic"], group["input_activations"]["dynamic"]) == (False, True)
    assert set(quantization["ignore"]) == set(kept)
    assert ct["architectures"] == ["Qwen3MoeForCausalLM"]
    assert ct["dtype"] == "float32"


def test_names_of_the_family(tmp_path):
    """mixtral's checkpoints say block_sparse_moe and w1, w2, w3; the list of what stays says so too."""
    mxmoe.save_checkpoint(quantized("mixtral"), tmp_path, "compressed-tensors")
    names = tensors_of(tmp_path).keys()
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight_scale" in names
    config = json.loads((tmp_path / "config.json").read_text())
    assert "model.layers.0.block_sparse_moe.gate" in config["quantization_config"]["ignore"]


def test_shards(tmp_path):
    """Several files, an index, each weight beside its scale."""
    model = quantized()
    mxmoe.save_checkpoint(model, tmp_path, max_shard_size=60_000)
    index = json.loads((tmp_path / checkpoint.INDEX).read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 2
    for name, file in index["weight_map"].items():
        if name.endswith(".weight_scale_inv"):
            assert index["weight_map"][name.removesuffix("_scale_inv")] == file
    total = sum(t.numel() * t.element_size() for t in tensors_of(tmp_path).values())
    assert index["metadata"]["total_size"] == total
    other = model_of("qwen3_moe", seed=1)
    mxmoe.load_checkpoint(other, tmp_path)
    cases.assert_bitwise(logits(other), logits(model))


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match=r"call mxmoe\.quantize_experts\(model\) first"):
        mxmoe.save_checkpoint(model_of("qwen3_moe"), tmp_path)
    with pytest.raises(ValueError, match="format must be one of"):
        mxmoe.save_checkpoint(quantized(), tmp_path, "gguf")
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.experts: experts with biases"):
        mxmoe.save_checkpoint(quantized("gpt_oss"), tmp_path)
    with pytest.raises(ValueError, match="keep gate_up_proj of all experts in one tensor"):
        mxmoe.save_checkpoint(quantized("granitemoe"), tmp_path)
    assert not list(tmp_path.iterdir())
    mxmoe.save_checkpoint(quantized(), tmp_path)
    with pytest.raises(FileExistsError, match="holds a checkpoint"):
        mxmoe.save_checkpoint(quantized(), tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"of somebody else")
    mxmoe.save_checkpoint(quantized(seed=1), tmp_path, "compressed-tensors", overwrite=True)
    assert (tmp_path / "adapter_model.safetensors").read_bytes() == b"of somebody else"
    (tmp_path / "adapter_model.safetensors").unlink()
    assert not any(k.endswith("_scale_inv") for k in tensors_of(tmp_path))
    other = tmp_path / "weights_only"
    other.mkdir()
    (other / "model.safetensors").write_bytes(b"precious")
    with pytest.raises(FileExistsError, match="or part of one"):
        mxmoe.save_checkpoint(quantized(), other)
    assert (other / "model.safetensors").read_bytes() == b"precious"


# --- round trips -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("format", checkpoint.FORMATS)
@pytest.mark.parametrize("family", LOADABLE)
def test_save_and_load(family, format, tmp_path):
    model = quantized(family, dtype=torch.bfloat16)
    mxmoe.save_checkpoint(model, tmp_path, format)
    for other in (model_of(family, dtype=torch.bfloat16, seed=1), quantized(family, dtype=torch.bfloat16, seed=2)):
        mxmoe.load_checkpoint(other, tmp_path)
        cases.assert_bitwise(logits(other), logits(model))


def test_part_of_the_layers(tmp_path):
    """A layer that was left in high precision stays so, in the file and in transformers' list."""
    model = model_of("qwen3_moe")
    mxmoe.quantize_experts(model, exclude="model.layers.0.*", progress=False)
    mxmoe.save_checkpoint(model, tmp_path)
    kept = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert "model.layers.0.mlp.experts" in kept
    tensors = tensors_of(tmp_path)
    assert tensors["model.layers.0.mlp.experts.0.up_proj.weight"].dtype == torch.float32
    other = model_of("qwen3_moe", seed=1)
    mxmoe.load_checkpoint(other, tmp_path)
    assert not serving.is_quantized(other.model.layers[0].mlp.experts)
    cases.assert_bitwise(logits(other), logits(model))


@pytest.mark.parametrize("family", LOADABLE)
def test_transformers_expands_it(family, tmp_path):
    """Without a GPU transformers expands fp8 checkpoints: exactly our values."""
    pytest.importorskip("accelerate")
    import transformers

    if DEVICE != "cpu":
        pytest.skip("transformers expands fp8 checkpoints only where there is no GPU")
    model = quantized(family)
    mxmoe.save_checkpoint(model, tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    expected = logits(model)
    assert (logits(loaded) - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe"])
def test_transformers_runs_it_on_our_kernel(family, tmp_path, monkeypatch):
    """``from_pretrained(experts_implementation="mxmoe")``: bytes unchanged, dispatched to us, logits equal."""
    pytest.importorskip("accelerate")
    import transformers
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    from mxmoe.integrations import huggingface_fp8

    huggingface_fp8.register()
    model = quantized(family)
    mxmoe.save_checkpoint(model, tmp_path)
    # transformers keeps fp8 weights only where it sees a GPU; nothing else of it needs one.
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda self, *args, **kwargs: None)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, experts_implementation="mxmoe", device_map=DEVICE
    ).eval()
    experts = [m for n, m in loaded.named_modules() if n.endswith(".experts")]
    assert {type(m).__name__ for m in experts} == {"FP8Experts"}
    reference = [m for n, m in model.named_modules() if n.endswith(".experts")]
    for theirs, ours in zip(experts, reference, strict=True):
        cases.assert_bitwise(theirs.gate_up_proj.data.view(torch.uint8), ours.gate_up_proj)
        cases.assert_bitwise(theirs.down_proj_scale_inv.data.view(torch.uint8), ours.down_proj_scale)
    with mxmoe.observe() as seen:
        out = logits(loaded)
    assert len(seen) == 2 * len(experts)
    cases.assert_bitwise(out, logits(model))


def test_compressed_tensors_decompresses_it(tmp_path):
    """The package of that name validates the config and gives exactly our values."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    model = quantized()
    mxmoe.save_checkpoint(model, tmp_path, "compressed-tensors")
    raw = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(raw)
    scheme = config.config_groups["group_0"]
    tensors = tensors_of(tmp_path)
    module = model.model.layers[1].mlp.experts
    q, s = (getattr(module, n).cpu() for n in ("gate_up_proj", "gate_up_proj_scale"))
    values = quantize.dequantize(q.view(torch.float8_e4m3fn), s, "rowwise", None, None, q.shape[1], torch.float32)
    key = "model.layers.1.mlp.experts.5.up_proj"
    compressor = BaseCompressor.load_from_registry("mxfp8-quantized")
    state = {"weight": tensors[f"{key}.weight"], "weight_scale": tensors[f"{key}.weight_scale"]}
    back = compressor.decompress(state, scheme)
    weight = back["weight"] if isinstance(back, dict) else back
    cases.assert_bitwise(weight.float(), values[5, 32:])


# --- corruption ------------------------------------------------------------------------------------------------------
def cut(file):
    file.write_bytes(file.read_bytes()[:-100])


def flip(file):
    data = bytearray(file.read_bytes())
    data[-5] ^= 0x10
    file.write_bytes(bytes(data))


def break_header(file):
    data = bytearray(file.read_bytes())
    data[12] = 0xFF
    file.write_bytes(bytes(data))


def shorten_to_nothing(file):
    file.write_bytes(b"\x01")


def lose(file):
    file.unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "is truncated or corrupted"),
        (flip, "is corrupted: its CRC-32 differs"),
        (break_header, "is corrupted"),
        (shorten_to_nothing, "is truncated"),
        (lose, "is missing"),
    ],
)
def test_a_damaged_file_leaves_nothing_half_loaded(damage, message, tmp_path):
    mxmoe.save_checkpoint(quantized(), tmp_path, max_shard_size=60_000)
    damage(sorted(tmp_path.glob("*.safetensors"))[-1])
    model = model_of("qwen3_moe", seed=1)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        mxmoe.load_checkpoint(model, tmp_path)
    assert model.state_dict().keys() == before.keys()
    for k, v in before.items():
        cases.assert_bitwise(model.state_dict()[k], v, k)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"dtype":"BF16"', b'"dtype":"BG16"'),
        (b'"dtype":"BF16"', b'"dtype":"F32" '),
        (b'"data_offsets":[', b'"data_offsetz":['),
        (b'"shape":[', b'"shapf":['),
    ],
)
def test_a_damaged_header_without_sums(old, new, tmp_path):
    """Checkpoints of others have no CRC-32: a header that is JSON but wrong is found before anything is loaded."""
    mxmoe.save_checkpoint(quantized(dtype=torch.bfloat16), tmp_path, max_shard_size=60_000)
    (tmp_path / checkpoint.INDEX).unlink()
    file = max(f for f in tmp_path.glob("*.safetensors") if old in f.read_bytes())
    head, tail = file.read_bytes().rsplit(old, 1)
    file.write_bytes(head + new + tail)
    model = model_of("qwen3_moe", dtype=torch.bfloat16, seed=1)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ValueError, match=f"{file.name} is (truncated or )?corrupted"):
        mxmoe.load_checkpoint(model, tmp_path)
    assert model.state_dict().keys() == before.keys()
    for k, v in before.items():
        cases.assert_bitwise(model.state_dict()[k], v, k)


@pytest.mark.parametrize("text", ["[]", "null", '{"weight_map": []}', '{"weight_map": {"a": 3}}', "{}"])
@pytest.mark.parametrize("file", [checkpoint.INDEX, "config.json"])
def test_json_of_another_shape(file, text, tmp_path):
    mxmoe.save_checkpoint(quantized(), tmp_path)
    (tmp_path / file).write_text(text)
    with pytest.raises(ValueError, match=f"{file}( is corrupted| has no quantization_config)"):
        mxmoe.load_checkpoint(model_of("qwen3_moe"), tmp_path)


def test_a_file_of_the_sums_is_missing(tmp_path):
    mxmoe.save_checkpoint(quantized(), tmp_path)
    index = json.loads((tmp_path / checkpoint.INDEX).read_text())
    index["metadata"]["mxmoe_crc32"]["gone.safetensors"] = 1
    (tmp_path / checkpoint.INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"gone\.safetensors is missing"):
        mxmoe.load_checkpoint(model_of("qwen3_moe"), tmp_path)


def test_load_keeps_the_recipe_and_refuses_meta(tmp_path):
    model = model_of("qwen3_moe")
    mxmoe.quantize_experts(model, recipe=mxmoe.MXRecipe(), progress=False)
    mxmoe.save_checkpoint(model, tmp_path)
    other = model_of("qwen3_moe", seed=1)
    mxmoe.quantize_experts(other, recipe=mxmoe.MXRecipe(), progress=False)
    mxmoe.load_checkpoint(other, tmp_path)
    cases.assert_bitwise(logits(other), logits(model))
    with pytest.raises(ValueError, match="has no memory"):
        mxmoe.load_checkpoint(model_of("qwen3_moe").to("meta"), tmp_path)


def rewrite(path, change):
    """Change the tensors of a checkpoint of one file, and drop the index that no longer fits."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    (path / checkpoint.INDEX).unlink()


def test_wrong_contents(tmp_path):
    """Missing, extra, misshapen tensors, another quantization, another family: named, and nothing is loaded."""
    mxmoe.save_checkpoint(quantized(), tmp_path / "good")
    key = "model.layers.0.mlp.experts.3.up_proj.weight"

    def attempt(name, change, message, family="qwen3_moe"):
        path = tmp_path / name
        shutil.copytree(tmp_path / "good", path)
        rewrite(path, change)
        model = model_of(family, seed=1)
        with pytest.raises(ValueError, match=message):
            mxmoe.load_checkpoint(model, path)
        assert not any(serving.is_quantized(m) for m in model.modules())

    attempt("missing", lambda t: t.pop(key), f"lacks '{key}'")
    attempt("no_scale", lambda t: t.pop(f"{key}_scale_inv"), f"lacks '{key}_scale_inv'")
    attempt("extra", lambda t: t.update(odd=torch.zeros(1)), "no place for, first 'odd'")
    short = r"is F8_E4M3 \[16, 64\], expected F8_E4M3 \[32, 64\]"
    attempt("shape", lambda t: t.update({key: t[key][:16].contiguous()}), short)
    attempt("dtype", lambda t: t.update({f"{key}_scale_inv": t[f"{key}_scale_inv"].float()}), "is F32")
    attempt("family", lambda t: None, r"lacks 'model\.layers\.0\.block_sparse_moe\.experts\.0\.w1\.weight'", "mixtral")
    config = json.loads((tmp_path / "good/config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [128, 128]
    (tmp_path / "good/config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="describes another quantization"):
        mxmoe.load_checkpoint(model_of("qwen3_moe"), tmp_path / "good")
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        mxmoe.load_checkpoint(model_of("qwen3_moe"), tmp_path)


# --- conversion ------------------------------------------------------------------------------------------------------
@pytest.fixture
def source(tmp_path):
    """A bf16 checkpoint of two or more shards, with a tokenizer beside it."""
    path = tmp_path / "src"
    model = tiny_models.tiny("qwen3_moe", dtype=torch.bfloat16).eval()
    model.save_pretrained(path, max_shard_size="60KB")
    (path / "tokenizer.json").write_text("{}")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


@pytest.mark.parametrize("format", checkpoint.FORMATS)
def test_convert_equals_quantize_and_save(source, tmp_path, format, capsys):
    assert main(["convert", str(source), str(tmp_path / "dst"), "--format", format]) == 0
    model = quantized(dtype=torch.bfloat16)
    mxmoe.save_checkpoint(model, tmp_path / "saved", format)
    converted, saved = tensors_of(tmp_path / "dst"), tensors_of(tmp_path / "saved")
    assert converted.keys() == saved.keys()
    for name, t in saved.items():
        cases.assert_bitwise(converted[name], t, name)
    ours, theirs = (json.loads((tmp_path / d / "config.json").read_text()) for d in ("dst", "saved"))
    assert ours["quantization_config"] == theirs["quantization_config"]
    assert (tmp_path / "dst/tokenizer.json").exists()
    assert not (tmp_path / "dst" / checkpoint.STATE).exists()
    other = model_of("qwen3_moe", dtype=torch.bfloat16, seed=1)
    mxmoe.load_checkpoint(other, tmp_path / "dst")
    cases.assert_bitwise(logits(other), logits(model))


def test_convert_mixtral_names(tmp_path):
    tiny_models.tiny("mixtral", dtype=torch.bfloat16).save_pretrained(tmp_path / "src")
    checkpoint.convert_checkpoint(tmp_path / "src", tmp_path / "dst", progress=False)
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight_scale_inv" in tensors_of(tmp_path / "dst")


def test_convert_stacked_source(tmp_path):
    """A source that keeps all experts in one tensor, as transformers has them in memory."""
    model = tiny_models.tiny("qwen3_moe", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "per_expert")
    (tmp_path / "stacked").mkdir()
    shutil.copy(tmp_path / "per_expert/config.json", tmp_path / "stacked/config.json")
    state = {k: v.contiguous() for k, v in model.state_dict().items()}
    save_file(state, tmp_path / "stacked/model.safetensors")
    for name in ("per_expert", "stacked"):
        checkpoint.convert_checkpoint(tmp_path / name, tmp_path / f"{name}.mx", progress=False)
    a, b = (tensors_of(tmp_path / f"{name}.mx") for name in ("per_expert", "stacked"))
    assert a.keys() == b.keys()
    for name, t in a.items():
        cases.assert_bitwise(b[name], t, name)


def test_convert_resumes_and_cleans_up(source, tmp_path, monkeypatch):
    """Interrupted after two shards, with a half-written third: the next call writes only what is missing."""
    dst = tmp_path / "dst"
    written = []
    save = checkpoint._save_shard

    def interrupted(path, tensors):
        if len(written) == 2:
            path.with_name(path.name + ".tmp").write_bytes(b"half")
            raise KeyboardInterrupt
        written.append(path.name)
        return save(path, tensors)

    monkeypatch.setattr(checkpoint, "_save_shard", interrupted)
    assert main(["convert", str(source), str(dst)]) == 130
    assert (dst / checkpoint.STATE).exists()
    assert not (dst / "config.json").exists()
    with pytest.raises(ValueError, match="interrupted conversion with format='hf', now 'compressed-tensors'"):
        checkpoint.convert_checkpoint(source, dst, format="compressed-tensors", progress=False)

    flip(dst / written[1])  # finished, but damaged since: written again
    first = written[0]
    written.clear()

    def noting(path, tensors):
        written.append(path.name)
        return save(path, tensors)

    monkeypatch.setattr(checkpoint, "_save_shard", noting)
    checkpoint.convert_checkpoint(source, dst, progress=False)
    assert first not in written
    assert len(written) == len(list(source.glob("*.safetensors"))) - 1
    assert not list(dst.glob("*.tmp"))
    checkpoint.convert_checkpoint(source, tmp_path / "whole", progress=False)
    a, b = tensors_of(dst), tensors_of(tmp_path / "whole")
    assert a.keys() == b.keys()
    for name, t in b.items():
        cases.assert_bitwise(a[name], t, name)


@pytest.mark.parametrize("change", ["values", "one tensor", "time"])
def test_a_source_that_changed_is_converted_again(source, tmp_path, monkeypatch, caplog, change):
    """Another checkpoint of the same names and sizes in the place of the source: its shards were mixed with the old."""
    src, dst = source, tmp_path / "dst"
    written = []
    save = checkpoint._save_shard

    def noting(path, tensors):
        written.append(path.name)
        return save(path, tensors)

    def interrupted(path, tensors):
        if len(written) == 2:
            raise KeyboardInterrupt
        return noting(path, tensors)

    monkeypatch.setattr(checkpoint, "_save_shard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.convert_checkpoint(src, dst, progress=False)

    first = src / written[0]
    before = first.stat()
    if change == "time":  # nothing that is sampled: a value somewhere else in a large tensor
        os.utime(first, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    else:
        tensors = load_file(first)
        key = max(tensors, key=lambda name: tensors[name].numel())
        for name in tensors if change == "values" else [key]:
            tensors[name] = -tensors[name]
        save_file(tensors, first, metadata={"format": "pt"})
        os.utime(first, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert first.stat().st_size == before.st_size

    again = list(written)
    written.clear()
    monkeypatch.setattr(checkpoint, "_save_shard", noting)
    with caplog.at_level("WARNING"):
        checkpoint.convert_checkpoint(src, dst, progress=False)
    assert f"1 shards of {src} have changed" in caplog.text
    assert first.name in written
    assert again[1] not in written
    checkpoint.convert_checkpoint(src, tmp_path / "fresh", progress=False)
    for file in (tmp_path / "fresh").glob("*.safetensors"):
        assert (dst / file.name).read_bytes() == file.read_bytes()


def test_killed_before_the_first_state(source, tmp_path):
    """kill -9 while the state file was written: its unfinished copy is all there is, and it is ours."""
    dst = tmp_path / "dst"
    dst.mkdir()
    (dst / f"{checkpoint.STATE}.tmp").write_text('{"sou')
    checkpoint.convert_checkpoint(source, dst, progress=False)
    assert not list(dst.glob("*.tmp"))
    mxmoe.load_checkpoint(model_of("qwen3_moe", dtype=torch.bfloat16), dst)


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_layers_that_transformers_ignores(family, tmp_path):
    """Layers that predict further tokens (46 of glm4_moe, 61 of deepseek_v3) stay bf16, are listed so, and load."""
    layer = {"glm4_moe": 46, "deepseek_v3": 61}[family]
    source = tmp_path / "src"
    tiny_models.tiny(family, dtype=torch.bfloat16).save_pretrained(source)
    tensors = load_file(source / "model.safetensors")
    key = f"model.layers.{layer}.mlp.experts.0.up_proj"
    tensors[f"{key}.weight"] = tensors["model.layers.1.mlp.experts.0.up_proj.weight"].clone()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, source / "consolidated.safetensors")  # the same model for another engine: not read
    for format in checkpoint.FORMATS:
        dst = tmp_path / format
        checkpoint.convert_checkpoint(source, dst, format=format, progress=False)
        assert [f.name for f in dst.glob("*.safetensors")] == ["model.safetensors"]
        cases.assert_bitwise(tensors_of(dst)[f"{key}.weight"], tensors[f"{key}.weight"])
        mxmoe.load_checkpoint(model_of(family, dtype=torch.bfloat16), dst)
    config = json.loads((tmp_path / "compressed-tensors/config.json").read_text())
    assert key in config["quantization_config"]["ignore"]


def test_convert_refuses(source, tmp_path, capsys):
    dst = tmp_path / "dst"
    dst.mkdir()
    (dst / "notes.txt").write_text("mine")
    assert main(["convert", str(source), str(dst)]) == 1
    assert "is not empty and was not left by an interrupted conversion" in capsys.readouterr().err
    assert [p.name for p in dst.iterdir()] == ["notes.txt"]
    checkpoint.convert_checkpoint(source, tmp_path / "mx", progress=False)
    with pytest.raises(FileExistsError, match="holds a finished checkpoint"):
        checkpoint.convert_checkpoint(source, tmp_path / "mx", progress=False)
    with pytest.raises(ValueError, match=r"is quantized already \(fp8\)"):
        checkpoint.convert_checkpoint(tmp_path / "mx", tmp_path / "again", progress=False)
    with pytest.raises(ValueError, match="scale_mode must be one of"):
        checkpoint.convert_checkpoint(source, tmp_path / "again", scale_mode="up")
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        checkpoint.convert_checkpoint(tmp_path, tmp_path / "again")
    dense = tmp_path / "dense"
    shutil.copytree(source, dense)
    config = json.loads((dense / "config.json").read_text())
    (dense / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchModel"]}))
    with pytest.raises(ValueError, match=r"names no model that transformers .* has: \['NoSuchModel'\]"):
        checkpoint.convert_checkpoint(dense, tmp_path / "again", progress=False)
    assert not (tmp_path / "again").exists()


def test_convert_verifies_what_it_wrote(source, tmp_path, monkeypatch):
    """A disk that loses a byte is noticed before the file gets its name."""
    import safetensors.torch

    save = safetensors.torch.save_file

    def lossy(tensors, path, **kwargs):
        save(tensors, path, **kwargs)
        with open(path, "r+b") as f:
            length = struct.unpack("<Q", f.read(8))[0]
            f.seek(8 + length + 1)
            byte = f.read(1)[0]
            f.seek(8 + length + 1)
            f.write(bytes([byte ^ 1]))

    monkeypatch.setattr(safetensors.torch, "save_file", lossy)
    with pytest.raises(OSError, match="does not read back as it was written"):
        checkpoint.convert_checkpoint(source, tmp_path / "dst", progress=False)
    assert not list((tmp_path / "dst").glob("*.safetensors"))
