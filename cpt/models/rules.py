"""What a recipe's `model:` section can be told without opening a model: needs neither torch nor transformers."""

import re

from cpt.recipe.schema import Model

NEMO_ONLY = {  # Hub ids that hold a .nemo file and nothing that from_pretrained reads -> the id to use
    "nvidia/nemotron-3-8b-base-4k": "nvidia/Minitron-8B-Base",
    "nvidia/nemotron-3-8b-chat-4k-sft": "nvidia/Minitron-8B-Base",
    "nvidia/nemotron-3-8b-chat-4k-rlhf": "nvidia/Minitron-8B-Base",
    "nvidia/nemotron-3-8b-chat-4k-steerlm": "nvidia/Minitron-8B-Base",
    "nvidia/nemotron-3-8b-qa-4k": "nvidia/Minitron-8B-Base",
}
COMMIT = re.compile(r"[0-9a-f]{40}")
SHA256 = re.compile(r"[0-9a-f]{64}")


def check_model_section(model: Model) -> list[str]:
    """Every mistake that the section alone shows, each with its remedy; an empty list when there is none."""
    return [*_check_start(model), *_check_trust(model), *_check_hashes(model)]


def nemo_remedy(path: str, known_to_be_nemo: bool = False) -> str | None:
    """What to say about weights that exist only as a `.nemo` file; None when nothing says that they do."""
    use = NEMO_ONLY.get(path.lower())
    if use is None and not known_to_be_nemo:
        return None
    remedy = use or "nvidia/Minitron-8B-Base (Nemotron, 8B, 4K context)"
    return (
        f"model.path: {path} holds a .nemo file only, which from_pretrained cannot load. Use {remedy}, or convert it"
        " with NeMo."
    )


def _check_start(model: Model) -> list[str]:
    problems = []
    if model.path is None and not model.from_scratch:
        problems.append("model.path is missing: name the weights to start from, or say `model.from_scratch: true`.")
    if model.from_scratch and model.path is None and model.config is None:
        problems.append(
            "model.config is missing: `from_scratch` without a `path` needs the architecture (`model: {base:"
            " models/...}`)."
        )
    if model.config is not None and "model_type" not in model.config:
        problems.append(
            "model.config.model_type is missing: it names the architecture, for instance `model_type: llama`."
        )
    if model.path is not None and (nemo := nemo_remedy(model.path)):
        problems.append(nemo)
    if model.path is None and model.revision is not None:
        problems.append("model.revision has no effect without model.path. Remove it.")
    return problems


def _check_trust(model: Model) -> list[str]:
    pinned = model.revision is not None and COMMIT.fullmatch(model.revision)
    if model.trust_remote_code and not pinned:
        return [
            "model.trust_remote_code runs code that comes with the weights: pin it. "
            f"model.revision must be a full commit hash of 40 hex digits, not {model.revision!r}."
        ]
    return []


def _check_hashes(model: Model) -> list[str]:
    if model.hashes and (model.path is None or model.from_scratch):
        return ["model.hashes has no effect: no weights are loaded (from_scratch). Remove it."]
    return [
        f"model.hashes.{name} is not a sha256 (64 lower-case hex digits)."
        for name, digest in model.hashes.items()
        if not SHA256.fullmatch(digest)
    ]
