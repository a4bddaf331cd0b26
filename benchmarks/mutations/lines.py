"""Lines that a wrong result would pass through unseen if no test held them, how each is broken, and the tests that must notice."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """One line, broken."""

    about: str
    file: str
    line: str
    """A part of the file that stands in it once."""
    broken: str
    tests: str
    """A file of tests, from the repository's root."""


MUTATIONS = (
    Mutation(
        "data order",
        "cpt/data/mixture/mixture.py",
        "before, upto, total = left_before, left_upto, total - proportion",
        "before, upto, total = left_before, left_upto, total",
        "tests/data/mixture/test_mixture.py",
    ),
    Mutation(
        "data order",
        "cpt/data/mixture/mixture.py",
        "return quotas, {source: owed[source] - quotas[source] for source in active}",
        "return quotas, dict.fromkeys(active, 0.0)",
        "tests/data/mixture/test_mixture.py",
    ),
    Mutation(
        "data order",
        "cpt/data/packing.py",
        "if gcd(draw, count) == 1)",
        "if draw >= 0)",
        "tests/data/test_packing.py",
    ),
    Mutation(
        "data order",
        "cpt/data/selection.py",
        " & ~np.isin(hashes, self.judged)",
        "",
        "tests/data/test_selection.py",
    ),
    Mutation(
        "data order",
        "cpt/data/selection.py",
        "return hashes < np.uint64(int(self.held_out_share * 2**64))",
        "return np.zeros(len(hashes), bool)",
        "tests/data/test_selection.py",
    ),
    Mutation(
        "packing mask",
        "cpt/data/rows.py",
        "position_ids[at:after] = counting[:length]",
        "position_ids[at:after] = counting[at:after]",
        "tests/data/test_rows.py",
    ),
    Mutation(
        "packing mask",
        "cpt/data/rows.py",
        "            labels[begin] = IGNORED",
        "            pass",
        "tests/data/test_rows.py",
    ),
    Mutation(
        "packing mask",
        "cpt/models/documents.py",
        "begins[:, 1:] = position_ids.diff(dim=1) != 1",
        "begins[:, 1:] = position_ids.diff(dim=1) > 1",
        "tests/models/test_documents.py",
    ),
    Mutation(
        "packing mask",
        "cpt/models/varlen_attention.py",
        ".tril().triu(1 - window)",
        ".tril()",
        "tests/models/test_varlen_attention.py",
    ),
    Mutation(
        "loss normalisation",
        "cpt/models/fused_loss.py",
        "count = num_items_in_batch if num_items_in_batch is not None else (targets != IGNORED).sum()",
        "count = (targets != IGNORED).sum()",
        "tests/models/test_fused_loss.py",
    ),
    Mutation(
        "loss normalisation",
        "cpt/models/fused_loss.py",
        "shift_labels = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]",
        "shift_labels = labels",
        "tests/models/test_fused_loss.py",
    ),
    Mutation(
        "optimizer",
        "cpt/optim/groups.py",
        "dimensions(parameter) >= 2 and id(parameter) not in embeddings",
        "dimensions(parameter) >= 2",
        "tests/optim/test_groups.py",
    ),
    Mutation(
        "optimizer",
        "cpt/optim/clipping.py",
        "(max_norm / (norm + 1e-6)).clamp(max=1.0)",
        "max_norm / (norm + 1e-6)",
        "tests/optim/test_clipping.py",
    ),
    Mutation(
        "optimizer",
        "cpt/optim/schedules.py",
        "return factor((step + 1) * tokens_per_step, total_tokens, **options)",
        "return factor(step * tokens_per_step, total_tokens, **options)",
        "tests/optim/test_schedules.py",
    ),
    Mutation(
        "resume",
        "cpt/checkpoints/resume.py",
        "for checkpoint in reversed(published_checkpoints(folder)):",
        "for checkpoint in published_checkpoints(folder):",
        "tests/checkpoints/test_resume.py",
    ),
    Mutation(
        "resume",
        "cpt/checkpoints/resume.py",
        "if bad and not allow_restart:",
        "if False:",
        "tests/checkpoints/test_resume.py",
    ),
    Mutation(
        "resume",
        "cpt/checkpoints/resume.py",
        "if step_of(path) > step_of(checkpoint)]",
        "if step_of(path) >= step_of(checkpoint)]",
        "tests/checkpoints/test_resume.py",
    ),
    Mutation(
        "resume",
        "cpt/checkpoints/resume.py",
        'if list(checkpoint.glob("global_step*")) and not trust:',
        "if False:",
        "tests/checkpoints/test_resume.py",
    ),
    Mutation(
        "checkpoint manifest",
        "cpt/checkpoints/manifest.py",
        "return None if found == entry else",
        "return None if found.size == entry.size else",
        "tests/checkpoints/test_manifest.py",
    ),
    Mutation(
        "checkpoint manifest",
        "cpt/checkpoints/manifest.py",
        "if as_text(manifest) != text:",
        "if False:",
        "tests/checkpoints/test_manifest.py",
    ),
    Mutation(
        "checkpoint manifest",
        "cpt/checkpoints/manifest.py",
        'if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:',
        "if PurePosixPath(name).is_absolute():",
        "tests/checkpoints/test_manifest.py",
    ),
    Mutation(
        "checkpoint manifest",
        "cpt/checkpoints/transaction.py",
        "    write_manifest(staging, manifest)\n    if read_back is not None:\n        read_back(staging)\n",
        "    write_manifest(staging, manifest)\n",
        "tests/checkpoints/test_read_back.py",
    ),
    Mutation(
        "safety",
        "cpt/checkpoints/safe_load.py",
        'os.environ[FORCE_DATA] = "1"',
        'os.environ[FORCE_CODE] = "1"',
        "tests/checkpoints/test_safe_load.py",
    ),
    Mutation(
        "safety",
        "cpt/safety/loss_guard.py",
        "spikes.append(value - median > limit * max(SIGMA_OF_MAD * deviation, 1))",
        "spikes.append(value - median > limit * SIGMA_OF_MAD * deviation)",
        "tests/safety/test_loss_guard.py",
    ),
    Mutation(
        "safety",
        "cpt/safety/loss_guard.py",
        "skip = any(spikes) or not all(math.isfinite(value) for value in values)",
        "skip = any(spikes)",
        "tests/safety/test_loss_guard.py",
    ),
    Mutation(
        "safety",
        "cpt/safety/skip_budget.py",
        "if other.step > judged.step - self.window] + [skipped]",
        "] + [skipped]",
        "tests/safety/test_skip_budget.py",
    ),
    Mutation(
        "planner",
        "cpt/planner/optimizer_terms.py",
        "FULL_MOMENTS * trained + (MASTER * trained if rounding_of(setup) is None else compensation)",
        "FULL_MOMENTS * trained",
        "tests/planner/test_optimizer_terms.py",
    ),
    Mutation(
        "planner",
        "cpt/planner/advice.py",
        "return gpu_room(plan, target, share) >= 0 and (not target.host_is_known or host_room(plan, target) >= 0)",
        "return gpu_room(plan, target, share) >= 0",
        "tests/planner/test_advice.py",
    ),
    Mutation(
        "recipe checks",
        "cpt/recipe/sense.py",
        "if model.trust_remote_code and not is_pinned:",
        "if False:",
        "tests/recipe/test_sense.py",
    ),
    Mutation(
        "recipe checks",
        "cpt/recipe/sense.py",
        'if training.get("bf16") and training.get("fp16"):',
        "if False:",
        "tests/recipe/test_sense.py",
    ),
    Mutation(
        "recipe checks",
        "cpt/recipe/yaml_lines.py",
        "    if LEADING_ZERO.fullmatch(text):",
        "    if False:",
        "tests/recipe/test_yaml_lines.py",
    ),
    Mutation(
        "export proof",
        "cpt/checkpoints/proof.py",
        "return Difference((one - other).abs().max().item(), largest_logit, allowed)",
        "return Difference((one - other).abs().min().item(), largest_logit, allowed)",
        "tests/checkpoints/test_proof.py",
    ),
    Mutation(
        "export proof",
        "cpt/checkpoints/proof.py",
        "return self.largest <= self.allowed",
        "return not self.largest > self.allowed",
        "tests/checkpoints/test_proof.py",
    ),
    Mutation(
        "verdict",
        "cpt/evaluation/paired.py",
        "return self.low > 0 or self.high < 0",
        "return self.difference != 0",
        "tests/evaluation/test_paired.py",
    ),
)
