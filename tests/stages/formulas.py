"""The losses of papers, written out: what a step of each stage must compute.

Log-probabilities are those of an answer's own tokens, without padding; numbers are in float64.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import logsigmoid

# --- preferences -----------------------------------------------------------------------------------------------------


@dataclass
class Answers:
    """One answer to each of B prompts: log-probabilities of its tokens, [T] each."""

    policy: list[torch.Tensor]
    reference: list[torch.Tensor] = field(default_factory=list)
    prompt: list[torch.Tensor] = field(default_factory=list)  # of the prompt's tokens but the first
    probabilities: list[torch.Tensor] = field(default_factory=list)  # [T, V]

    @property
    def lengths(self) -> torch.Tensor:
        return torch.tensor([len(tokens) for tokens in self.policy])

    @property
    def log_likelihood(self) -> torch.Tensor:
        """Log pi(y|x): [B]."""
        return torch.stack([tokens.sum() for tokens in self.policy])

    @property
    def log_ratio(self) -> torch.Tensor:
        """Log pi(y|x) / pi_ref(y|x): [B]."""
        return self.log_likelihood - torch.stack([tokens.sum() for tokens in self.reference])


def margin(better: Answers, worse: Answers) -> torch.Tensor:
    return better.log_ratio - worse.log_ratio


def dpo(better, worse, beta):
    """arXiv 2305.18290, equation 7."""
    return -logsigmoid(beta * margin(better, worse)).mean()


def hinge(better, worse, beta):
    """SLiC's hinge on DPO's rewards, as RSO (arXiv 2309.06657) normalizes it."""
    return (1 - beta * margin(better, worse)).clamp(min=0).mean()


def ipo(better, worse, beta):
    """arXiv 2310.12036, equation 17, of means of tokens instead of sums."""
    means = better.log_ratio / better.lengths - worse.log_ratio / worse.lengths
    return (means - 1 / (2 * beta)).square().mean()


def exo_pair(better, worse, beta, epsilon):
    """arXiv 2402.00856, equation 16: KL from the model's choice between two answers to the smoothed label."""
    chosen = torch.sigmoid(beta * margin(better, worse))
    choice = torch.stack((chosen, 1 - chosen))
    label = torch.tensor([[1 - epsilon], [epsilon]])
    return (choice * (choice / label).log()).sum(0).mean()


def nca_pair(better, worse, beta):
    """NCA of two answers, arXiv 2402.05369."""
    reward, other = beta * better.log_ratio, beta * worse.log_ratio
    return -(logsigmoid(reward) + 0.5 * logsigmoid(-reward) + 0.5 * logsigmoid(-other)).mean()


def robust(better, worse, beta, epsilon):
    """Robust DPO, arXiv 2403.00409: unbiased if a share epsilon of labels is flipped."""
    right, flipped = dpo(better, worse, beta), dpo(worse, better, beta)
    return ((1 - epsilon) * right - epsilon * flipped) / (1 - 2 * epsilon)


def bco_pair(better, worse, beta):
    """BCO, arXiv 2404.04656, with a reward shift of 0."""
    return -(logsigmoid(beta * better.log_ratio) + logsigmoid(-beta * worse.log_ratio)).mean()


def sppo_hard(better, worse, beta):
    """arXiv 2405.00675, equation 4.7, with P 1 for the better and 0 for the worse answer; eta is 1 / beta."""
    wins = (better.log_ratio - (1 - 0.5) / beta).square()
    losses = (worse.log_ratio - (0 - 0.5) / beta).square()
    return (wins + losses).mean()


def smoothed(gaps, beta, epsilon):
    return -((1 - epsilon) * logsigmoid(beta * gaps) + epsilon * logsigmoid(-beta * gaps)).mean()


def aot(better, worse, beta, epsilon):
    """Paired AOT, arXiv 2406.05882: quantiles of the policy's margins over those of the reference's."""
    policy = better.log_likelihood - worse.log_likelihood
    reference = policy - margin(better, worse)
    return smoothed(policy.sort().values - reference.sort().values, beta, epsilon)


def aot_unpaired(better, worse, beta, epsilon):
    """Unpaired AOT, arXiv 2406.05882: quantiles of the better answers over those of the worse ones."""
    gaps = better.log_ratio.sort().values - worse.log_ratio.sort().values
    return smoothed(gaps, beta, epsilon)


def apo_zero(better, worse, beta):
    """arXiv 2408.06266, equation 7, plus 1."""
    return (1 - (beta * better.log_ratio).sigmoid() + (beta * worse.log_ratio).sigmoid()).mean()


def apo_down(better, worse, beta):
    """arXiv 2408.06266, equation 8, plus 1."""
    chosen = (beta * better.log_ratio).sigmoid()
    return (chosen + 1 - (beta * margin(better, worse)).sigmoid()).mean()


def discopop(better, worse, beta, tau):
    """arXiv 2406.08414, equation 5."""
    logits = beta * margin(better, worse)
    share = (logits / tau).sigmoid()
    return ((1 - share) * -logsigmoid(logits) + share * (-logits).exp()).mean()


def mean_of_tokens(answers: Answers) -> torch.Tensor:
    """Cross entropy, averaged over the tokens of all answers."""
    return -answers.log_likelihood.sum() / answers.lengths.sum()


def sigmoid_norm(better, worse, beta):
    """Length-normalized DPO of Tulu 3, arXiv 2411.15124."""
    means = better.log_ratio / better.lengths - worse.log_ratio / worse.lengths
    return -logsigmoid(beta * means).mean()


def f_dpo(better, worse, beta, slope):
    """f-DPO, arXiv 2309.16240: `slope` is the derivative of f, of the ratio of an answer's likelihoods."""
    gain, other = (slope(answers.log_ratio.exp()) for answers in (better, worse))
    return -logsigmoid(beta * (gain - other)).mean()


def ld_dpo(better, worse, beta, alpha):
    """LD-DPO, arXiv 2409.06411: tokens past the shorter answer of a pair count alpha."""
    shared = torch.minimum(better.lengths, worse.lengths)
    ratios = []
    for answers in (better, worse):
        tokens = [own - other for own, other in zip(answers.policy, answers.reference, strict=True)]
        pairs = zip(tokens, shared.tolist(), strict=True)
        ratios.append(torch.stack([one[:at].sum() + alpha * one[at:].sum() for one, at in pairs]))
    return -logsigmoid(beta * (ratios[0] - ratios[1])).mean()


def wpo(better, worse, beta):
    """WPO, arXiv 2406.11827, equation 2, with its alignment of weights to the policy's samples."""
    weights = []
    for answers in (better, worse):
        pairs = zip(answers.policy, answers.probabilities, strict=True)
        aligned = [own - every.square().sum(-1).log() for own, every in pairs]
        weights.append(torch.stack([tokens.mean().exp() for tokens in aligned]).detach())
    losses = -logsigmoid(beta * margin(better, worse))
    return (weights[0] * weights[1] * losses).mean()


def orpo(better, worse, beta):
    """arXiv 2403.07691, equations 3 to 7; the cross entropy is that of prompts too, over all tokens of the batch."""
    odds = []
    for answers in (better, worse):
        likelihood = (answers.log_likelihood / answers.lengths).exp()
        odds.append(likelihood / (1 - likelihood))
    ratio = -logsigmoid((odds[0] / odds[1]).log()).mean()
    whole = Answers([torch.cat(both) for both in zip(better.prompt, better.policy, strict=True)])
    return mean_of_tokens(whole) + beta * ratio


def cpo(better, worse, beta, alpha):
    """arXiv 2401.08417, equation 3; the likelihood of the better answers is averaged over tokens."""
    prefer = -logsigmoid(beta * (better.log_likelihood - worse.log_likelihood)).mean()
    return prefer + alpha * mean_of_tokens(better)


def simpo(better, worse, beta, gamma):
    """arXiv 2405.14734, equation 6."""
    means = better.log_likelihood / better.lengths - worse.log_likelihood / worse.lengths
    return -logsigmoid(beta * means - gamma).mean()


def kto(answers, is_good, divergence, beta, good_weight, bad_weight):
    """L_KTO of arXiv 2402.01306; `divergence` is its z_0."""
    gain = answers.log_ratio - divergence
    values = torch.where(is_good, (beta * gain).sigmoid(), (-beta * gain).sigmoid())
    weights = torch.where(is_good, good_weight, bad_weight)
    return (weights * (1 - values)).mean()


def divergence_of_others(log_ratios: torch.Tensor) -> torch.Tensor:
    """z_0 of arXiv 2402.01306, of answers to other prompts; it has no gradient."""
    return log_ratios.mean().clamp(min=0).detach()


def bradley_terry(better_scores, worse_scores, centering):
    """arXiv 2203.02155, equation 1, and arXiv 2312.09244, equation 2: scores of pairs are centred on 0."""
    preference = -logsigmoid(better_scores - worse_scores).mean()
    return preference + centering * (better_scores + worse_scores).square().mean()


# --- conversations, with and without a teacher -----------------------------------------------------------------------


def smoothed_cross_entropy(tokens, every, epsilon):
    """arXiv 1512.00567, section 7: a share epsilon of a label is uniform over the vocabulary."""
    return -((1 - epsilon) * tokens + epsilon * every.mean(-1))


def jensen_shannon(student: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    """arXiv 2306.13649, equation 1, of each token's probabilities [T, V]; beta 0 and 1 are its limits, the forward and
    reverse KL."""

    def kl(first, second):
        return (first * (first / second).log()).sum(-1)

    if beta in (0, 1):
        return kl(student, teacher) if beta else kl(teacher, student)
    mixture = beta * teacher + (1 - beta) * student
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


# --- rewards ---------------------------------------------------------------------------------------------------------


def clipped_policy(ratio, advantage, low, high):
    """PPO, arXiv 1707.06347, equation 7, as a loss."""
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def divergence_of_tokens(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """GRPO, arXiv 2402.03300, equation 4."""
    ratio = (reference - policy).exp()
    return ratio - ratio.log() - 1


def within_groups(rewards: torch.Tensor) -> torch.Tensor:
    """GRPO, arXiv 2402.03300, section 4.1.2, of [groups, answers]; TRL's deviation is the unbiased one, plus 1e-4."""
    centred = rewards - rewards.mean(1, keepdim=True)
    answers = rewards.size(1)
    deviation = (centred.square().sum(1, keepdim=True) / (answers - 1)).sqrt()
    return centred / (deviation + 1e-4)


def leave_one_out(rewards: torch.Tensor) -> torch.Tensor:
    """RLOO, arXiv 2402.14740, section 3.2, of [groups, answers]: compared with the mean of the others."""
    answers = rewards.size(1)
    others = (rewards.sum(1, keepdim=True) - rewards) / (answers - 1)
    return rewards - others


def generalized_advantages(reward: float, values: Sequence, gamma: float, lam: float) -> list:
    """arXiv 1506.02438, equation 16, of one answer whose reward comes with its last token."""
    last = len(values) - 1
    deltas = [
        (reward if t == last else 0) + gamma * (values[t + 1] if t < last else 0) - value
        for t, value in enumerate(values)
    ]
    return [
        sum((gamma * lam) ** (later - t) * deltas[later] for later in range(t, last + 1))
        for t in range(last + 1)
    ]


def normalized(numbers: torch.Tensor, least_deviation: float) -> torch.Tensor:
    """Mean 0 and deviation 1, unless the deviation is smaller than the least."""
    mean = numbers.mean()
    deviation = math.sqrt((numbers - mean).square().mean())
    return (numbers - mean) / max(deviation, least_deviation)


def clipped_values(values, before, returns, clip):
    """Values' loss of PPO's reference implementation (arXiv 2005.12729, section 3), halved."""
    moved = before + (values - before).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - returns).square(), (moved - returns).square())


def learned(known: Sequence[float], reward: float, rho: float) -> tuple[float, float]:
    """SPO's tracker, arXiv 2509.13232: alpha and beta of a Beta distribution that forgets."""
    alpha, beta, *_ = known
    return rho * alpha + reward, rho * beta + 1 - reward


def value(known: Sequence[float]) -> float:
    alpha, beta, *_ = known
    return alpha / (alpha + beta)


def drift(before: dict, after: dict) -> float:
    """Mean over tokens of exp(d) - d - 1, with d the change of a token's log-probability."""
    changes = torch.cat([after[sample] - before[sample] for sample in before])
    return (changes.exp() - changes - 1).mean().item()
