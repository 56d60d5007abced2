"""What a network predicts, and how much each noise level counts.

Every prediction p of a noisy picture x is a linear form of the clean picture: x0 = a x + b p (Salimans and Ho 2022,
appendix D, for noise, x0 and v; Lipman et al. 2023 for flow). So an error of p is an error of x0 times b, and a weight
of the squared error of x0 becomes, times b^2, the weight of the squared error of p.

The preconditioning of Karras et al. 2022, for data of deviation 1, is "v" without a weight: its sigma is our sigma /
alpha, its noisy picture our x / alpha, its network sees x, and the factor of its loss cancels that of its output.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .schedule import Schedule

OBJECTIVES = ("noise", "x_start", "v", "flow")
LOSS_WEIGHTS = ("none", "min_snr", "p2", "sigmoid", "learned")
LOSS_TYPES: dict[str, Callable[..., Tensor]] = {"l2": F.mse_loss, "l1": F.l1_loss, "huber": F.smooth_l1_loss}


def target_of(objective: str, x0: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
    """What the network should predict for x = alpha x0 + sigma noise; shapes broadcast."""
    if objective == "noise":
        return noise
    if objective == "x_start":
        return x0
    return alpha * noise - sigma * x0 if objective == "v" else noise - x0


def coefficients(objective: str, alpha: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """a and b of x0 = a x + b p."""
    if objective == "noise":
        return 1 / alpha, -sigma / alpha
    if objective == "x_start":
        return torch.zeros_like(alpha), torch.ones_like(alpha)
    return (alpha, -sigma) if objective == "v" else (torch.ones_like(alpha), -sigma)


def x_start_of(objective: str, prediction: Tensor, x: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
    """The clean picture that a prediction means, at the noisy picture x."""
    a, b = coefficients(objective, alpha, sigma)
    return a * x + b * prediction


def loss_weights(
    name: str,
    schedule: Schedule,
    objective: str,
    *,
    min_snr_gamma: float = 5.0,
    p2_gamma: float = 1.0,
    p2_k: float = 1.0,
    sigmoid_bias: float = -1.0,
) -> Tensor:
    """Weight of each level's squared error of the prediction, fp64 (T,).

    Except for "none" (and "learned", which `LearnedWeight` scales), weights are of the error of x0, so that the loss of
    a given estimate of x0 is the same whatever is predicted:

    - none: 1 for the prediction.
    - min_snr: min(SNR, gamma) (Hang et al. 2023, eq. 8).
    - p2: SNR / (k + SNR)^gamma (Choi et al. 2022, eq. 8, which divides the loss of the noise by (k + SNR)^gamma).
    - sigmoid: SNR sigmoid(bias - log SNR) |d log SNR / dt| for t in [0, 1], that is sigmoid(bias - log SNR) per unit of
      log SNR for the noise, whatever the schedule (Kingma and Gao 2023; Hoogeboom et al. 2024).

    The last three are 0 at SNR 0, and fall towards it: as the SNR does, or with sigmoid as alpha does for v and flow.
    What a network predicts there it knows from its neighbours. Measured: the error of its estimate at the last level
    equals that at the level before it, whether the last level was trained with weight 0 or with a small one.
    """
    if name in ("none", "learned"):
        return torch.ones_like(schedule.log_snr)
    snr = schedule.log_snr.exp()
    if name == "min_snr":
        of_x0 = snr.clamp_max(min_snr_gamma)
    elif name == "p2":
        of_x0 = snr / (p2_k + snr) ** p2_gamma
    else:
        # With tan(angle) = sigma / alpha, log SNR = -2 log tan(angle). The angle is finite where the log SNR is not.
        angle = torch.atan2(schedule.sigma, schedule.alpha)
        speed = torch.gradient(angle, spacing=1 / schedule.timesteps)[0]
        of_x0 = (sigmoid_bias - schedule.log_snr).sigmoid() * 2 * angle.cos() / angle.sin() ** 3 * speed
        of_x0 = torch.where(snr == 0, 0.0, of_x0)
    return of_x0 * coefficients(objective, schedule.alpha, schedule.sigma)[1] ** 2


def check_combination(schedule: Schedule, objective: str, weight: str) -> None:
    """Refuse what cannot be trained or sampled.

    Raises:
        ValueError: an unknown name; noise predicted where no picture is left; or "flow" without a flow schedule or the
            reverse.
    """
    for name, value, known in (("objective", objective, OBJECTIVES), ("loss weight", weight, LOSS_WEIGHTS)):
        if value not in known:
            raise ValueError(f"{name} {value!r} does not exist: choose one of {', '.join(known)}")
    if schedule.is_flow and objective in ("noise", "v"):
        raise ValueError(f"objective {objective} does not fit the flow schedule: choose objective flow or x_start")
    if objective == "flow" and not schedule.is_flow:
        raise ValueError("objective flow needs the schedule flow, where x = (1 - t) x0 + t noise")
    if objective == "noise" and schedule.ends_at_zero_snr:
        raise ValueError(
            "objective noise says nothing about the picture at the last noise level, whose SNR is 0: "
            "choose objective v or x_start, or a schedule that does not end at SNR 0"
        )


class LearnedWeight(nn.Module):
    """u(log SNR), for the loss L / e^u + u, whose minimum is e^u = expected L: each level then counts alike.

    Karras et al. 2024, eq. 14-16. Here u is a cosine series over log SNR in [-20, 20], with constant, and starts at 0.
    """

    def __init__(self, terms: int = 32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(terms))

    def forward(self, log_snr: Tensor) -> Tensor:
        """log SNR (b,), which may be -inf -> u (b,), at least fp32."""
        place = (log_snr.clamp(-20, 20) + 20) / 40
        order = torch.arange(len(self.weight), device=log_snr.device)
        # Not a product of matrices, which autocast would compute in bf16.
        return ((place[:, None] * order * math.pi).cos() * self.weight).sum(1)


class WithLearnedWeight(nn.Module):
    """A network and the weight of its loss, as one model of an engine: `DiffusionLoss` with weight "learned" needs it.

    forward(x, t, **conditions) -> (the network's prediction, u (b,)).
    """

    log_snr: Tensor

    def __init__(self, network: nn.Module, schedule: Schedule) -> None:
        super().__init__()
        self.network = network
        self.loss_weight = LearnedWeight()
        self.register_buffer("log_snr", schedule.log_snr.float(), persistent=False)

    def forward(self, x: Tensor, t: Tensor, **conditions: Tensor) -> tuple[Tensor, Tensor]:
        return self.network(x, t, **conditions), self.loss_weight(self.log_snr[t].float())
