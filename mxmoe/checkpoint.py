"""Checkpoints of models with MXFP8 experts in two formats that other engines read; conversion shard by shard.

    format                 weight (N, K)      scale (N, ceil(K/32))          read by
    "hf"                   F8_E4M3            .weight_scale_inv  F8_E8M0      transformers (fine-grained fp8)
    "compressed-tensors"   F8_E4M3            .weight_scale      U8           vLLM, SGLang (mxfp8-quantized)

Both hold one weight and one plain (never blocked) scale per expert and projection, under the names of the family's own
checkpoints, which transformers knows (``mlp.experts.3.gate_proj.weight``, ``block_sparse_moe.experts.3.w1.weight``).
The bytes are the same in both. Source: ``docs/serving.md``; transformers ``core_model_loading.py``;
compressed-tensors ``mxfp8-quantized``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from . import serving
from .formats import BLOCK, SCALE_DTYPE, SCALE_MODES
from .integrations.huggingface_fp8 import SERVING_RECIPE

logger = logging.getLogger(__name__)

FORMATS: Final = ("hf", "compressed-tensors")
INDEX: Final = "model.safetensors.index.json"
STATE: Final = ".mxmoe-convert.json"
"""Progress of a conversion that has not finished; its presence is what makes a folder resumable."""

_SUFFIX = {"hf": "weight_scale_inv", "compressed-tensors": "weight_scale"}
_NAMES = {"BOOL": torch.bool, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": SCALE_DTYPE}
_HIGH = ("BF16", "F16", "F32")
_CHUNK = 16 * 2**20
_SAMPLE = 4096
"""Bytes of every tensor that tell one source from another of the same names, shapes and sizes."""


# --- names -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Part:
    """One expert's share of a stacked weight: rows ``part * rows / parts ..`` of expert ``expert``."""

    module: str  # full name of the experts module
    weight: str  # "gate_up_proj", "up_proj" or "down_proj"
    expert: int
    part: int
    parts: int


def _revert(model: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State-dict entries under the names (and in the pieces) of the family's checkpoints."""
    from transformers.core_model_loading import revert_weight_conversion

    reverted: dict[str, Tensor] = revert_weight_conversion(model, dict(state))
    return reverted


def expert_keys(model: nn.Module, module: str, weight: str, experts: int, gated: bool) -> dict[str, Part]:
    """Checkpoint name of every expert's weight -> :class:`Part`, in the order in which they are written.

    transformers splits a stacked weight into checkpoint pieces; here it splits a stack of labels instead.
    Raises: ``ValueError`` if the family has no name per expert.
    """
    rows = 2 if weight == "gate_up_proj" and gated else 1
    labels = torch.arange(experts * rows, dtype=torch.int64).view(experts, rows, 1)
    pieces = _revert(model, {f"{module}.{weight}": labels})
    found = {}
    for name, piece in pieces.items():
        if piece.numel() != 1 or not name.endswith(".weight"):
            kind = type(model).__name__
            raise ValueError(
                f"{kind}: checkpoints of this family keep {weight} of all experts in one tensor ({name}); the formats "
                f"{FORMATS} have one weight per expert, and no engine reads anything else in MXFP8. Keep the model "
                "with torch.save(model.state_dict()) instead"
            )
        label = int(piece)
        found[name] = Part(module, weight, label // rows, label % rows, rows)
    return found


def _plain_keys(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Checkpoint name -> state-dict name of everything but expert weights.

    Raises: ``ValueError`` if one is not stored as it is in memory.
    """
    found = {}
    for name in names:
        pieces = _revert(model, {name: torch.zeros(1, 1, 1)})
        if len(pieces) != 1:
            raise ValueError(f"{name} is stored as {sorted(pieces)}: only expert weights may be split")
        found[next(iter(pieces))] = name
    return found


def _experts_of(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if serving.is_quantized(module)}


def _tied(model: nn.Module) -> set[str]:
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return set(tied)


# --- config ----------------------------------------------------------------------------------------------------------
def quantization_config(model: nn.Module, format: str, converted: Iterable[str]) -> dict[str, Any]:
    """The ``quantization_config`` of ``config.json``.

    ``converted``: full names of the quantized experts modules. Every other ``nn.Linear`` and experts module is listed
    by its full checkpoint name as not quantized: transformers matches the list by prefix and compressed-tensors
    targets every Linear.
    """
    converted = set(converted)
    keep = []
    for name, module in model.named_modules():
        if name in converted or any(name.startswith(f"{c}.") for c in converted):
            continue
        if isinstance(module, nn.Linear) or _is_router(module) or serving.is_experts(module):
            keep.append(name)
    if format == "hf":
        _refuse_prefixes(keep, converted)
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [1, BLOCK],
            "scale_fmt": "ue8m0",
            "modules_to_not_convert": keep,
        }
    values = {
        "num_bits": 8,
        "type": "float",
        "strategy": "group",
        "group_size": BLOCK,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.uint8",
    }
    renamed: dict[str, None] = {}
    for name in keep:  # names of checkpoints: engines know no others
        piece = next(iter(_revert(model, {f"{name}.weight": torch.zeros(1, 1)})))
        renamed[piece.removesuffix(".weight")] = None
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp8-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": "mxfp8-quantized",
                "weights": values,
                "input_activations": {**values, "dynamic": True},
            }
        },
        "ignore": list(renamed),
        "kv_cache_scheme": None,
    }


def _is_router(module: nn.Module) -> bool:
    # Routers are modules of their own in transformers 5 (a weight, no Linear); engines make Linear layers of them.
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    return weight is not None and weight.ndim == 2 and not isinstance(module, nn.Embedding)


def _refuse_prefixes(keep: Iterable[str], converted: set[str]) -> None:
    for name in keep:
        hit = next((c for c in converted if c.startswith(name)), None)
        if hit is not None:
            raise ValueError(f"modules_to_not_convert matches by prefix: {name!r} would also exclude {hit!r}")


# --- files -----------------------------------------------------------------------------------------------------------
def _read_header(path: Path) -> dict[str, Any]:
    """Header of a safetensors file, checked against the length of the file.

    Raises: ``ValueError`` naming the file and what is wrong with it.
    """
    from safetensors import SafetensorError, safe_open

    try:
        size = path.stat().st_size
        with path.open("rb") as f:
            length = int.from_bytes(f.read(8), "little")
            if size < 8 or length > size - 8:
                raise ValueError(f"{path} is truncated: {size} bytes, its header alone is said to take {length}")
            header = json.loads(f.read(length))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is corrupted: its header is no JSON ({error})") from None
    try:
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        differs = 8 + length + end != size
    except (TypeError, KeyError, AttributeError, IndexError):
        raise ValueError(f"{path} is corrupted: its header describes no tensors") from None
    if differs:
        raise ValueError(f"{path} is truncated or corrupted: {size} bytes, its header describes {8 + length + end}")
    try:
        with safe_open(str(path), framework="pt"):  # checks dtypes, shapes and offsets against each other
            pass
    except SafetensorError as error:
        raise ValueError(f"{path} is corrupted: {error}") from None
    return header  # type: ignore[no-any-return]


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as f:
        while piece := f.read(_CHUNK):
            value = zlib.crc32(piece, value)
    return value


def _fingerprint(path: Path) -> str:
    """What tells a source shard from another of the same size: time of its last change, header, a piece per tensor."""
    header = _read_header(path)
    digest = hashlib.blake2b(str(path.stat().st_mtime_ns).encode(), digest_size=16)
    with path.open("rb") as f:
        first = int.from_bytes(f.read(8), "little")
        digest.update(f.read(first))
        for begin, end in sorted(entry["data_offsets"] for entry in header.values()):
            f.seek(8 + first + max(begin, (begin + end - _SAMPLE) // 2))
            digest.update(f.read(min(_SAMPLE, end - begin)))
    return digest.hexdigest()


def _write_json(path: Path, value: object) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(temporary, path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{path} is missing") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is corrupted: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is corrupted: it holds no JSON object")
    return value


def _sums(path: Path) -> dict[str, int]:
    """CRC-32 sums of files that an index holds, if it does. Raises ``ValueError``."""
    metadata = _read_json(path / INDEX).get("metadata") or {}
    sums = metadata.get("mxmoe_crc32", {}) if isinstance(metadata, dict) else None
    if not isinstance(sums, dict):
        raise ValueError(f"{path / INDEX} is corrupted: its metadata is no JSON object")
    return sums


def _shards(path: Path) -> dict[str, list[str]]:
    """File name -> tensor names, of a folder with or without an index. Raises ``ValueError`` if they disagree."""
    if (path / INDEX).exists():
        weight_map = _read_json(path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise ValueError(f"{path / INDEX} is corrupted: it has no weight_map of file names")
        files: dict[str, list[str]] = {}
        for name, file in weight_map.items():
            files.setdefault(file, []).append(name)
        for file, names in files.items():
            present = _read_header(path / file)
            missing = sorted(set(names) - present.keys())
            if missing:
                raise ValueError(f"{path / file} lacks {len(missing)} tensors of the index, first {missing[0]!r}")
        return files
    # Without an index a checkpoint is one file of this name; others beside it hold the same model in another form.
    whole = path / "model.safetensors"
    found = [whole] if whole.exists() else sorted(path.glob("*.safetensors"))
    if not found:
        raise ValueError(f"{path} holds no *.safetensors")
    return {file.name: list(_read_header(file)) for file in found}


def _save_shard(path: Path, tensors: Mapping[str, Tensor]) -> int:
    """Write, read back and compare a shard; it appears under its name only when it is right. Returns its CRC-32."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    temporary = path.with_name(path.name + ".tmp")
    contiguous = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    save_file(contiguous, str(temporary), metadata={"format": "pt"})
    with safe_open(str(temporary), framework="pt") as f:
        for name, t in contiguous.items():
            back = f.get_tensor(name)
            if back.dtype != t.dtype or not torch.equal(back.view(torch.uint8), t.view(torch.uint8)):
                raise OSError(f"{temporary}: {name} does not read back as it was written; is the disk full or failing?")
    value = _crc32(temporary)
    os.replace(temporary, path)
    return value


def _check_format(format: str) -> None:
    if format not in FORMATS:
        raise ValueError(f"format must be one of {FORMATS}, got {format!r}")


def _check_model(model: object, function: str) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function}() takes a torch.nn.Module, got {type(model).__name__}")


def _check_blocks(module: str, weight: str, k: int) -> None:
    if k % BLOCK:
        raise ValueError(
            f"{module}.{weight}: K={k} is not a multiple of {BLOCK}; other engines read whole blocks only. Leave this "
            f'layer in high precision (exclude="{module}")'
        )


# --- save ------------------------------------------------------------------------------------------------------------
def save_checkpoint(
    model: nn.Module,
    path: str | os.PathLike[str],
    format: str = "hf",
    *,
    max_shard_size: int = 5 * 10**9,
    overwrite: bool = False,
) -> None:
    """Save a model whose experts are MXFP8 (``quantize_experts``) so that other engines read it.

    | name | type | meaning |
    |---|---|---|
    | ``model`` | transformers model | after :func:`mxmoe.quantize_experts` |
    | ``path`` | folder | made if absent |
    | ``format`` | "hf", "compressed-tensors" | transformers loads "hf", vLLM and SGLang the other |
    | ``max_shard_size`` | bytes | of one file |
    | ``overwrite`` | bool | replace a checkpoint that is there |

    Expert scales are stored plain. Every file is read back and compared before it gets its name; the index, and with
    it the checkpoint, appears last. CRC-32 sums of the files are kept in the index for :func:`load_checkpoint`.
    Raises: ``ValueError`` for an unknown format, a model without MXFP8 experts, a family or layer that the format
    cannot hold (stacked checkpoints, biases, gates of its own, K not a multiple of 32); ``FileExistsError``.
    Sync: copies to the host, one shard at a time. Source: ``docs/serving.md``.
    """
    _check_format(format)
    _check_model(model, "save_checkpoint")
    path = Path(path)
    modules = _experts_of(model)
    if not modules:
        raise ValueError("the model has no MXFP8 experts: call mxmoe.quantize_experts(model) first")
    for name, module in modules.items():
        _refuse_unknown(name, module, format)
    present = [path / "config.json", path / INDEX, *path.glob("model*.safetensors")]
    if not overwrite and any(file.exists() for file in present):
        raise FileExistsError(
            f"{path} holds a checkpoint, or part of one: choose another folder, or pass overwrite=True"
        )

    entries = _entries(model, modules, format)
    config = quantization_config(model, format, modules)
    path.mkdir(parents=True, exist_ok=True)
    for stale in (*present, *path.glob("model*.tmp")):
        stale.unlink(missing_ok=True)
    shards = _plan(entries, max_shard_size)
    weight_map: dict[str, str] = {}
    sums: dict[str, int] = {}
    total = 0
    for i, names in enumerate(shards):
        file = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        tensors = {name: entries[name][1]() for name in names}
        sums[file] = _save_shard(path / file, tensors)
        weight_map |= dict.fromkeys(names, file)
        total += sum(t.nbytes for t in tensors.values())
    _write_config(model, path, config)
    _write_json(path / INDEX, _index(weight_map, sums, total))


def _refuse_unknown(name: str, module: nn.Module, format: str) -> None:
    up, down = serving.weights_of(module)
    for weight in (up, down):
        _check_blocks(name, weight, serving.stored(module, weight).shape[-1])
    if getattr(module, "has_bias", False):
        raise ValueError(f"{name}: experts with biases have no MXFP8 checkpoint form in any engine")
    if format == "hf" and not serving.default_gate(module):
        raise ValueError(
            f"{name}: {type(module).__name__} has a gate of its own, which transformers replaces by its default one "
            'when it loads fp8 experts: the logits would be wrong. Use format="compressed-tensors"'
        )


Entry = tuple[int, Callable[[], Tensor]]


def _entries(model: nn.Module, modules: Mapping[str, nn.Module], format: str) -> dict[str, Entry]:
    """Checkpoint name -> (bytes, how to get the tensor), in the order of the model."""
    entries: dict[str, Entry] = {}
    high = {name: module for name, module in model.named_modules() if serving.is_experts(module)}
    hidden = {
        f"{name}.{entry}"
        for name, module in {**modules, **high}.items()
        for w in serving.weights_of(module)
        for entry in serving.entries(w)
    }
    state = {k: v for k, v in model.state_dict().items() if k not in hidden and k not in _tied(model)}
    for key, name in _plain_keys(model, state).items():
        entries[key] = (state[name].nbytes, _giver(state[name]))
    for name, module in high.items():
        for weight in serving.weights_of(module):
            for key, view in _high_views(model, name, module, weight).items():
                entries[key] = (view.nbytes, _giver(view))
    for name, module in modules.items():
        for weight in serving.weights_of(module):
            qdata, scale = serving.stored(module, weight), serving.stored_scale(module, weight)
            gated = getattr(module, "has_gate", True)
            for key, part in expert_keys(model, name, weight, qdata.shape[0], gated).items():
                q, s = (t[part.expert].chunk(part.parts)[part.part] for t in (qdata, scale))
                entries[key] = (q.nbytes, _giver(q, torch.float8_e4m3fn))
                scale_key = f"{key.removesuffix('weight')}{_SUFFIX[format]}"
                entries[scale_key] = (s.nbytes, _giver(s, SCALE_DTYPE if format == "hf" else torch.uint8))
    return entries


def _high_views(model: nn.Module, name: str, module: nn.Module, weight: str) -> dict[str, Tensor]:
    """Checkpoint name -> its part of a stacked weight in high precision."""
    w = serving.stored(module, weight).detach()
    w = w.mT if module.is_transposed else w
    keys = expert_keys(model, name, weight, w.shape[0], getattr(module, "has_gate", True))
    return {key: w[part.expert].chunk(part.parts)[part.part] for key, part in keys.items()}


def _giver(t: Tensor, dtype: torch.dtype | None = None) -> Callable[[], Tensor]:
    # A copy: views of one stack would be saved as shared storage.
    return lambda: t.detach().cpu().clone().view(dtype or t.dtype)


def _plan(entries: Mapping[str, Entry], limit: int) -> list[list[str]]:
    """Names of every shard: in order, each at most ``limit`` bytes; a weight stays with its scale."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, (nbytes, _) in entries.items():
        is_scale = name.endswith(tuple(_SUFFIX.values()))
        if shards[-1] and size + nbytes > limit and not is_scale:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    return shards


def _index(weight_map: Mapping[str, str], sums: Mapping[str, int], total: int) -> dict[str, Any]:
    metadata = {"total_size": total, "mxmoe_crc32": dict(sums)}
    return {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}


def _write_config(model: Any, path: Path, quantization: dict[str, Any]) -> None:
    model.config.save_pretrained(path)
    config = _read_json(path / "config.json")
    config["quantization_config"] = quantization
    config["architectures"] = [type(model).__name__]
    config["dtype"] = str(_model_dtype(model)).removeprefix("torch.")
    _write_json(path / "config.json", config)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        with contextlib.suppress(ValueError):  # transformers refuses to save settings that contradict each other
            generation.save_pretrained(path)


def _model_dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.bfloat16)


# --- load ------------------------------------------------------------------------------------------------------------
def load_checkpoint(model: nn.Module, path: str | os.PathLike[str], *, verify: bool = True) -> None:
    """Load a checkpoint of either format into a transformers model; its experts become MXFP8.

    | name | type | meaning |
    |---|---|---|
    | ``model`` | transformers model | of the same family and sizes, quantized or not, on any device |
    | ``path`` | folder | written by :func:`save_checkpoint` or ``python -m mxmoe convert``, or in the same format |
    | ``verify`` | bool | compare CRC-32 sums where the index has them (reads the files once more) |

    Everything is checked before anything is loaded: files, headers, sums, names, shapes and dtypes. Then experts are
    replaced layer by layer, so there are never two copies of the model.
    A module that was quantized before keeps its recipe. Tensors that the family's models ignore in a checkpoint
    (layers that predict further tokens) are ignored.
    Raises: ``ValueError`` naming the file or tensor, or if the model is on the meta device. Sync: copies to the device.
    """
    _check_model(model, "load_checkpoint")
    path = Path(path)
    if empty := next((name for name, t in model.state_dict().items() if t.is_meta), None):
        raise ValueError(f"{empty} has no memory (meta device): build the model on a CPU or a GPU")
    config = _read_json(path / "config.json").get("quantization_config")
    format = _format_of(config, path)
    shards = _shards(path)
    if verify and (path / INDEX).exists():
        for file, expected in _sums(path).items():
            if not (path / file).exists():
                raise ValueError(f"{path / file} is missing")
            if _crc32(path / file) != expected:
                raise ValueError(f"{path / file} is corrupted: its CRC-32 differs from the one in {INDEX}")
    headers = {name: (file, entry) for file in shards for name, entry in _read_header(path / file).items()}
    plan = _load_plan(model, headers, format, path)
    with _Reader(path) as reader:
        _load(model, plan, headers, reader, format)


def _format_of(config: Any, path: Path) -> str:
    match config:
        case {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [1, 32]}:
            return "hf"
        case {"quant_method": "compressed-tensors", "format": "mxfp8-quantized"}:
            return "compressed-tensors"
        case None:
            raise ValueError(f"{path}/config.json has no quantization_config: this is no MXFP8 checkpoint")
        case _:
            names = ("quant_method", "format", "scale_fmt", "weight_block_size")
            kind = {k: config[k] for k in names if k in config}
            raise ValueError(f"{path}/config.json describes another quantization: {kind}")


@dataclass(frozen=True)
class _Plan:
    plain: dict[str, str]  # checkpoint name -> state-dict name
    high: dict[str, Tensor]  # checkpoint name -> its part of a stacked weight that stays in high precision
    experts: dict[str, dict[str, dict[str, Part]]]  # module -> weight -> checkpoint name -> part


def _load_plan(model: nn.Module, headers: Mapping[str, tuple[str, Any]], format: str, path: Path) -> _Plan:
    suffix = _SUFFIX[format]
    experts: dict[str, dict[str, dict[str, Part]]] = {}
    high: dict[str, Tensor] = {}
    hidden: set[str] = set()
    used: set[str] = set()
    for name, module in model.named_modules():
        if not (serving.is_experts(module) or serving.is_quantized(module)):
            continue
        weights = serving.weights_of(module)
        for weight in weights:
            shape = serving.logical_shape(module, weight)
            keys = expert_keys(model, name, weight, shape[0], getattr(module, "has_gate", True))
            if all(key in headers and headers[key][1]["dtype"] in _HIGH for key in keys):
                if serving.is_quantized(module):
                    raise ValueError(f"{name} is MXFP8 in the model, not in {path}: load it into a fresh model")
                for key, view in _high_views(model, name, module, weight).items():
                    _expect(headers, key, None, list(view.shape), path)
                    high[key] = view
                    used.add(key)
                hidden.add(f"{name}.{weight}")
                continue
            hidden.update(f"{name}.{entry}" for entry in serving.entries(weight))
            experts.setdefault(name, {})[weight] = keys
            for key, part in keys.items():
                rows = shape[1] // part.parts
                scale_key = f"{key.removesuffix('weight')}{suffix}"
                wanted = {
                    key: ("F8_E4M3", [rows, shape[2]]),
                    scale_key: ("F8_E8M0" if format == "hf" else "U8", [rows, -(-shape[2] // BLOCK)]),
                }
                for tensor, (dtype, size) in wanted.items():
                    _expect(headers, tensor, dtype, size, path)
                    used.add(tensor)
    if not experts:
        raise ValueError(f"{path} holds no MXFP8 weight of an experts module of {type(model).__name__}")
    state = {k: v for k, v in model.state_dict().items() if k not in hidden}
    tied = _tied(model)
    plain = {}
    for key, name in _plain_keys(model, state).items():
        if key not in headers and name in tied:
            continue
        _expect(headers, key, None, list(state[name].shape), path)
        plain[key] = name
        used.add(key)
    unexpected = sorted(key for key in headers.keys() - used if not _ignored(model, key))
    if unexpected:
        raise ValueError(
            f"{path} holds {len(unexpected)} tensors that {type(model).__name__} has no place for, "
            f"first {unexpected[0]!r}"
        )
    return _Plan(plain, high, experts)


def _ignored(model: nn.Module, key: str) -> bool:
    """Whether transformers, too, leaves this tensor of a checkpoint aside (layers that predict further tokens)."""
    patterns: Iterable[str] = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, key) for pattern in patterns)


def _expect(headers: Mapping[str, tuple[str, Any]], name: str, dtype: str | None, shape: list[int], path: Path) -> None:
    if name not in headers:
        raise ValueError(f"{path} lacks {name!r}")
    file, entry = headers[name]
    if entry["shape"] != shape or (dtype is not None and entry["dtype"] != dtype):
        wanted = f"{dtype or 'any dtype'} {shape}"
        raise ValueError(f"{path / file}: {name} is {entry['dtype']} {entry['shape']}, expected {wanted}")


class _Reader:
    """Open safetensors files, each opened once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stack = contextlib.ExitStack()
        self.files: dict[str, Any] = {}

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def tensor(self, file: str, name: str) -> Tensor:
        from safetensors import safe_open

        if file not in self.files:
            self.files[file] = self.stack.enter_context(safe_open(str(self.path / file), framework="pt"))
        t: Tensor = self.files[file].get_tensor(name)
        return t


def _load(model: nn.Module, plan: _Plan, headers: Mapping[str, tuple[str, Any]], reader: _Reader, format: str) -> None:
    suffix = _SUFFIX[format]

    def read(name: str) -> Tensor:
        return reader.tensor(headers[name][0], name)

    for module_name, weights in plan.experts.items():
        module: Any = model.get_submodule(module_name)
        recipe = module.mxmoe_recipe if serving.is_quantized(module) else SERVING_RECIPE
        for weight, keys in weights.items():
            device = serving.stored(module, weight).device
            e, n, k = serving.logical_shape(module, weight)
            qdata = torch.empty((e, n, k), dtype=torch.uint8, device=device)
            scale = torch.empty((e, n, -(-k // BLOCK)), dtype=torch.uint8, device=device)
            for key, part in keys.items():
                at = slice(part.part * n // part.parts, (part.part + 1) * n // part.parts)
                qdata[part.expert, at] = read(key).view(torch.uint8).to(device)
                scale[part.expert, at] = read(f"{key.removesuffix('weight')}{suffix}").view(torch.uint8).to(device)
            serving.set_weight(module, weight, qdata, scale)
        serving.finish(module, recipe)
    serving.guard(model)
    state = model.state_dict()
    with torch.no_grad():
        for key, view in plan.high.items():
            view.copy_(read(key))
        for key, name in plan.plain.items():
            state[name].copy_(read(key))
    tie: Any = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()


# --- convert ---------------------------------------------------------------------------------------------------------
def convert_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    format: str = "hf",
    scale_mode: str = "rceil",
    progress: bool = True,
) -> None:
    """Write an MXFP8 checkpoint of the bf16 checkpoint in ``src``, shard by shard; the model is never in memory.

    | name | type | meaning |
    |---|---|---|
    | ``src`` | folder | config.json and safetensors of a transformers model; expert weights in bf16, fp16 or fp32 |
    | ``dst`` | folder | absent, empty, or left by an interrupted conversion with the same arguments, which is resumed |
    | ``format`` | "hf", "compressed-tensors" | |
    | ``scale_mode`` | "rceil", "floor", "ceil", "even" | |
    | ``progress`` | bool | a bar on stderr |

    Memory: one shard. Each shard is written beside its name, read back, compared, then renamed: after an interruption
    the folder holds whole shards and a state file, never a half-written one. Resuming writes a shard again if its
    source or its result has changed since. config.json and the index come last.
    Raises: ``ValueError`` (no such model, already quantized, a family the format cannot hold, other arguments than the
    interrupted conversion's), ``FileExistsError`` (``dst`` holds something else).
    """
    _check_format(format)
    if scale_mode not in SCALE_MODES:
        raise ValueError(f"scale_mode must be one of {SCALE_MODES}, got {scale_mode!r}")
    src, dst = Path(src), Path(dst)
    config = _read_json(src / "config.json")
    if config.get("quantization_config") is not None:
        method = config["quantization_config"].get("quant_method")
        raise ValueError(f"{src} is quantized already ({method}): convert the bf16 checkpoint of the model")
    shards = _shards(src)
    model = _skeleton(src, config)
    jobs, modules = _jobs(model, src, shards, format)
    wanted = {
        "source": str(src.resolve()),
        "sizes": {file: (src / file).stat().st_size for file in shards},
        "format": format,
        "scale_mode": scale_mode,
    }
    done, sources = _resume(src, dst, wanted)
    quantization = quantization_config(model, format, modules)
    if format == "compressed-tensors":  # engines may build the layers that transformers ignores: bf16, as they were
        extra = {
            name.removesuffix(".weight")
            for names in shards.values()
            for name in names
            if name.endswith(".weight") and _ignored(model, name)
        }
        quantization["ignore"] += sorted(extra - set(quantization["ignore"]))

    weight_map: dict[str, str] = {}
    total = 0
    with serving.bar("converting shards", len(shards), progress) as advance:
        for file in shards:
            if file not in done:
                sources[file] = _fingerprint(src / file)
                done[file] = _save_shard(dst / file, _convert_shard(src / file, jobs, format, scale_mode))
                _write_json(dst / STATE, {**wanted, "done": done, "sources": sources})
            header = _read_header(dst / file)
            weight_map |= dict.fromkeys(header, file)
            total += sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in header.values())
            advance(1)
    _copy_rest(src, dst)
    _write_json(dst / INDEX, _index(weight_map, done, total))
    _write_json(dst / "config.json", {**config, "quantization_config": quantization})
    (dst / STATE).unlink()


def _skeleton(src: Path, config: dict[str, Any]) -> nn.Module:
    """The model of a config, on the meta device: names and shapes, no memory."""
    import transformers

    names = config.get("architectures") or []
    kind = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
    if kind is None:
        raise ValueError(f"{src}/config.json names no model that transformers {transformers.__version__} has: {names}")
    with torch.device("meta"):
        model: nn.Module = kind(kind.config_class.from_pretrained(src))
    return model


def _jobs(
    model: nn.Module, src: Path, shards: Mapping[str, list[str]], format: str
) -> tuple[dict[str, dict[str, Part]], set[str]]:
    """Source tensor -> the checkpoint names to write of it (one, or all experts of a stacked one); experts modules."""
    present = {name for names in shards.values() for name in names}
    jobs: dict[str, dict[str, Part]] = {}
    modules: set[str] = set()
    for name, module in model.named_modules():
        if not serving.is_experts(module):
            continue
        _refuse_module(name, module, format)
        for weight in serving.weights_of(module):
            shape = serving.logical_shape(module, weight)
            _check_blocks(name, weight, shape[2])
            keys = expert_keys(model, name, weight, shape[0], getattr(module, "has_gate", True))
            stacked = f"{name}.{weight}"
            if stacked in present:
                jobs[stacked] = keys
            elif missing := sorted(keys.keys() - present):
                raise ValueError(f"{src} lacks {len(missing)} of {len(keys)} expert weights, first {missing[0]!r}")
            else:
                jobs |= {key: {key: part} for key, part in keys.items()}
        modules.add(name)
    if not modules:
        raise ValueError(f"{type(model).__name__} has no experts that the transformers experts interface runs")
    return jobs, modules


def _refuse_module(name: str, module: nn.Module, format: str) -> None:
    if getattr(module, "has_bias", False):
        raise ValueError(f"{name}: experts with biases have no MXFP8 checkpoint form in any engine")
    if format == "hf" and not serving.default_gate(module):
        raise ValueError(f'{name}: {type(module).__name__} has a gate of its own; use format="compressed-tensors"')


def _resume(src: Path, dst: Path, wanted: Mapping[str, object]) -> tuple[dict[str, int], dict[str, str]]:
    """Shards that an interrupted conversion finished: their CRC-32, and what their source was like.

    Cleans up what it left half-written.
    """
    dst.mkdir(parents=True, exist_ok=True)
    state = dst / STATE
    if not state.exists():
        half = state.with_name(state.name + ".tmp")  # interrupted before the state file had its name
        if any(file != half for file in dst.iterdir()):
            found = "is not empty and was not left by an interrupted conversion"
            if any(dst.glob("*.safetensors")):
                found = "holds a finished checkpoint"
            raise FileExistsError(f"{dst} {found}: choose another folder")
        _write_json(state, {**wanted, "done": {}, "sources": {}})
        return {}, {}
    before = _read_json(state)
    done: dict[str, int] = before.pop("done", {})
    sources: dict[str, str] = before.pop("sources", {})
    for key, value in wanted.items():
        if before.get(key) != value:
            raise ValueError(
                f"{dst} holds an interrupted conversion with {key}={before.get(key)!r}, now {value!r}: "
                "finish that one, or remove the folder"
            )
    for stale in dst.glob("*.tmp"):
        stale.unlink()
    changed = [file for file in done if sources.get(file) != _fingerprint(src / file)]
    if changed:
        logger.warning(
            "%d shards of %s have changed since they were converted and are converted again, first %s",
            len(changed),
            src,
            changed[0],
        )
    kept = {
        file: crc
        for file, crc in done.items()
        if file not in changed and (dst / file).exists() and _crc32(dst / file) == crc
    }
    return kept, {file: sources[file] for file in kept}


def _convert_shard(path: Path, jobs: Mapping[str, dict[str, Part]], format: str, scale_mode: str) -> dict[str, Tensor]:
    from safetensors import safe_open

    written: dict[str, Tensor] = {}
    with safe_open(str(path), framework="pt") as f:
        for name in f.keys():  # noqa: SIM118  (no mapping)
            t = f.get_tensor(name)
            if name not in jobs:
                written[name] = t
                continue
            if t.dtype not in (torch.bfloat16, torch.float16, torch.float32):
                raise ValueError(f"{path}: {name} is {t.dtype}; expert weights must be bf16, fp16 or fp32")
            for key, part in jobs[name].items():
                w = t if t.ndim == 2 else t[part.expert].chunk(part.parts)[part.part]
                q, s = serving.quantize_weight(w.unsqueeze(0), scale_mode)
                written[key] = q[0].view(torch.float8_e4m3fn)
                scale = s[0].view(SCALE_DTYPE) if format == "hf" else s[0]
                written[f"{key.removesuffix('weight')}{_SUFFIX[format]}"] = scale
    return written


def _copy_rest(src: Path, dst: Path) -> None:
    """Tokenizer, generation config and whatever else belongs to the model."""
    for file in src.iterdir():
        skip = file.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf") or file.name in ("config.json", INDEX)
        if file.is_file() and not skip and not file.name.endswith(".index.json") and not file.name.startswith("."):
            shutil.copy2(file, dst / file.name)
