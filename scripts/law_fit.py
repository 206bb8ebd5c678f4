"""The scaling law of X-MoD, and its fit to a sweep.

    Delta = e - u Nact^-eta_N (1 - (N/Nact)^-rho_N)                     sparse capacity
              + w L^-eta_L (K^rho_L - 1)                                sparse context
              - z (K^rho_K - 1) ((2A/(A+1))^rho_A - 1)                  anchor stride

The constants u, w and z are the sizes of the three effects at Nact = 1, L = 1 ..., far from every model: an error of
an exponent moves them by orders of magnitude. The fit therefore works with each effect's size in the middle of the
design (its geometric mean), which the data see directly, and with differences of logarithms from there.

The dense loss under a difference is a run too, with the noise of a run, and all differences of a group share it.
`Design.whiten` takes this correlation out, so that what is squared, resampled and called noise is independent.
"""

from dataclasses import dataclass, field

import numpy as np

NAMES = ("e", "u", "eta_N", "rho_N", "w", "eta_L", "rho_L", "z", "rho_K", "rho_A")
EFFECTS = {"u": "sparse capacity", "w": "sparse context", "z": "anchor stride"}
EXPONENTS = {"u": ("eta_N", "rho_N"), "w": ("eta_L", "rho_L"), "z": ("rho_K", "rho_A")}
P = len(NAMES)
E, U, ETA_N, RHO_N, W, ETA_L, RHO_L, Z, RHO_K, RHO_A = range(P)

# Of e, of the effects in the middle of the design (nats) and of the exponents.
BOUNDS = {"e": (-1, 1), "u": (0, 5), "eta_N": (0, 1), "rho_N": (0.01, 5), "w": (0, 5), "eta_L": (0, 2),
          "rho_L": (0.01, 2), "z": (0, 5), "rho_K": (0.01, 2), "rho_A": (0.01, 5)}
STARTS = {"e": (-0.05, 0.05), "u": (0.01, 0.5), "eta_N": (0, 0.5), "rho_N": (0.2, 3), "w": (0.001, 0.3),
          "eta_L": (0.1, 2), "rho_L": (0.1, 2), "z": (0.001, 0.3), "rho_K": (0.1, 2), "rho_A": (0.2, 3)}


def predict(constants, N, N_act, L, K, A):
    """Delta by the law; constants: (..., 10), in the order of NAMES."""
    c = np.asarray(constants, float)[..., None]
    stride = 2 * A / (A + 1)
    return (c[..., E, :] - c[..., U, :] * N_act ** -c[..., ETA_N, :] * (1 - (N / N_act) ** -c[..., RHO_N, :])
            + c[..., W, :] * L ** -c[..., ETA_L, :] * (K ** c[..., RHO_L, :] - 1)
            - c[..., Z, :] * (K ** c[..., RHO_K, :] - 1) * (stride ** c[..., RHO_A, :] - 1))


def power(rho, x, middle):
    """(exp(rho x) - 1) / (exp(rho middle) - 1) and its derivative by rho; rho (B, 1), x (n,) -> (B, n)."""
    value = np.expm1(rho * x) / np.expm1(rho * middle)
    safe = np.where(x == 0, 1.0, x)
    slope = np.where(x == 0, 0.0, value * (safe / -np.expm1(-rho * safe) - middle / -np.expm1(-rho * middle)))
    return value, slope


@dataclass
class Middle:
    """Where the effects are measured: logarithms of N_act, N/N_act, L, K and 2A/(A+1)."""
    N_act: float
    growth: float
    L: float
    K: float
    stride: float

    @staticmethod
    def of(runs):
        def mean(values, fallback):
            values = values[values > 0]
            return float(values.mean()) if len(values) else fallback

        return Middle(float(np.log(runs.N_act).mean()), mean(np.log(runs.N / runs.N_act), 1.0),
                      float(np.log(runs.L).mean()), mean(np.log(runs.K), np.log(4)),
                      mean(np.log(2 * runs.A / (runs.A + 1)), np.log(4 / 3)))

    def factors(self, theta):
        """What turns effects into u, w and z, with the derivatives of its logarithm: [(index, factor, {index: slope})].
        """
        def slope(rho, x):  # of log(exp(rho x) - 1)
            return x / -np.expm1(-rho * x)

        rho_N, rho_L, rho_K, rho_A = (theta[..., i] for i in (RHO_N, RHO_L, RHO_K, RHO_A))
        with np.errstate(over="ignore"):
            return [
                (U, np.exp(theta[..., ETA_N] * self.N_act) / -np.expm1(-rho_N * self.growth),
                 {ETA_N: self.N_act, RHO_N: -self.growth / np.expm1(rho_N * self.growth)}),
                (W, np.exp(theta[..., ETA_L] * self.L) / np.expm1(rho_L * self.K),
                 {ETA_L: self.L, RHO_L: -slope(rho_L, self.K)}),
                (Z, 1 / (np.expm1(rho_K * self.K) * np.expm1(rho_A * self.stride)),
                 {RHO_K: -slope(rho_K, self.K), RHO_A: -slope(rho_A, self.stride)})]

    def constants(self, theta):
        """(..., 10) with effects -> (..., 10) with u, w, z."""
        constants = np.array(theta, float)
        for i, factor, _ in self.factors(constants):
            constants[..., i] = theta[..., i] * factor
        return constants

    def effects(self, constants):
        theta = np.array(constants, float)
        for i, factor, _ in self.factors(theta):
            theta[..., i] = constants[..., i] / factor
        return theta


class Design:
    """What was run, without its losses: the law's values, their derivatives, and the correlation of the differences."""

    def __init__(self, runs, middle=None):
        self.middle = middle or Middle.of(runs)
        self.N_act = np.log(runs.N_act) - self.middle.N_act
        self.growth = np.log(runs.N / runs.N_act)
        self.L = np.log(runs.L) - self.middle.L
        self.K = np.log(runs.K)
        self.stride = np.log(2 * runs.A / (runs.A + 1))
        # The covariance of a group is 1 + 1/m everywhere 1/m, m dense runs; its inverse root is 1 - share everywhere.
        _, group = np.unique(runs.group, return_inverse=True)
        self.members = np.eye(group.max() + 1)[group]  # (n, groups)
        size = self.members.sum(0)
        first = np.array([runs.dense_runs[group == g][0] for g in range(len(size))])
        self.share = (1 - 1 / np.sqrt(1 + size / first)) / size

    def whiten(self, values):
        """(..., n) -> (..., n): differences whose errors are independent."""
        return values - (values @ self.members * self.share) @ self.members.T

    def values(self, theta, slopes=True):
        """The law (B, n), and its derivatives (B, 10, n)."""
        m, t = self.middle, theta[:, :, None]
        gain, gain_slope = power(-t[:, RHO_N], self.growth, m.growth)
        cost, cost_slope = power(t[:, RHO_L], self.K, m.K)
        step, step_slope = power(t[:, RHO_K], self.K, m.K)
        wide, wide_slope = power(t[:, RHO_A], self.stride, m.stride)
        scale_N, scale_L = np.exp(-t[:, ETA_N] * self.N_act), np.exp(-t[:, ETA_L] * self.L)
        gain, gain_slope, cost, cost_slope = gain * scale_N, gain_slope * scale_N, cost * scale_L, cost_slope * scale_L
        value = t[:, E] - t[:, U] * gain + t[:, W] * cost - t[:, Z] * step * wide
        if not slopes:
            return value
        slope = np.stack([np.ones_like(value), -gain, t[:, U] * gain * self.N_act, t[:, U] * gain_slope,
                          cost, -t[:, W] * cost * self.L, t[:, W] * cost_slope,
                          -step * wide, -t[:, Z] * step_slope * wide, -t[:, Z] * step * wide_slope], axis=1)
        return value, slope


    def by_constants(self, theta, slope):
        """Derivatives (B, 10, n) by effects turned into those by e, the logarithms of u, w and z, and the exponents."""
        slope = slope.copy()
        for i, _, slopes in self.middle.factors(theta):
            slope[:, i] *= theta[:, i, None]  # an effect is its constant divided by a factor of the exponents
            for j, by in slopes.items():
                slope[:, j] -= slope[:, i] * np.reshape(by, (-1, 1))
        return slope


# ---------------------------------------------------------------------------------------------------------------
# least squares


@dataclass
class Problem:
    """Robust least squares: soft_l1 of (whitened law - target) / scale; scale inf: plain squares. priors: for a
    constant of the law, (index, value, standard deviation in units of the noise), each one more residual."""
    design: Design
    lower: np.ndarray
    upper: np.ndarray
    scale: float = np.inf
    priors: list = field(default_factory=list)
    ridge: float = 0.0  # pulls exponents towards STARTS' middle, where the design leaves some undetermined

    def residuals(self, theta, target):
        """(B, n) and (B, 10, n); target: whitened differences (B, n) or (n,)."""
        value, slope = self.design.values(theta)
        residual, slope = self.design.whiten(value) - target, self.design.whiten(slope)
        extra = [self.prior_residual(theta, *prior) for prior in self.priors]
        if self.ridge:
            middle = np.array([np.sqrt(max(low, 0.05) * high) for low, high in STARTS.values()])
            for i in (ETA_N, RHO_N, ETA_L, RHO_L, RHO_K, RHO_A):
                row = np.zeros_like(theta)
                row[:, i] = self.ridge
                extra.append((self.ridge * (theta[:, i] - middle[i]), row))
        if extra:
            residual = np.concatenate([residual] + [value[:, None] for value, _ in extra], axis=1)
            slope = np.concatenate([slope] + [row[:, :, None] for _, row in extra], axis=2)
        return residual, slope

    def prior_residual(self, theta, i, value, width):
        """(constant - value) / width and its derivatives (B, 10)."""
        row = np.zeros_like(theta)
        factor, slopes = 1.0, {}
        for j, f, s in self.design.middle.factors(theta):
            if j == i:
                factor, slopes = f, s
        constant = theta[:, i] * factor
        row[:, i] = factor / width
        for j, slope in slopes.items():
            row[:, j] = constant * slope / width
        return (constant - value) / width, row

    def cost(self, residual):
        """The sum of the losses, and the weight of each residual in the normal equations."""
        if np.isinf(self.scale):
            return (residual ** 2).sum(1), np.ones_like(residual)
        root = np.sqrt(1 + (residual / self.scale) ** 2)
        return 2 * self.scale ** 2 * (root - 1).sum(1), 1 / root


def minimise(problem, theta, target, steps=200):
    """Levenberg and Marquardt's method within bounds, for B problems at once: theta (B, 10) -> (theta, costs)."""
    theta = np.clip(theta, problem.lower, problem.upper)
    target = np.broadcast_to(target, (len(theta), target.shape[-1]))
    residual, slope = problem.residuals(theta, target)
    cost, weight = problem.cost(residual)
    damping = np.full(len(theta), 1e-2)
    still = np.zeros(len(theta), int)  # steps in a row that gained next to nothing
    live = np.arange(len(theta))
    for _ in range(steps):
        trial = theta[live] + step_of(problem, theta[live], residual, slope, weight, damping[live])
        trial = np.clip(trial, problem.lower, problem.upper)
        r, s = problem.residuals(trial, target[live])
        c, w = problem.cost(r)
        better = c < cost[live]
        still[live] = np.where(cost[live] - c > 1e-9 * cost[live], 0, still[live] + 1)
        damping[live] = np.clip(np.where(better, damping[live] / 5, damping[live] * 4), 1e-12, 1e12)
        theta[live[better]], cost[live[better]] = trial[better], c[better]
        residual[better], slope[better], weight[better] = r[better], s[better], w[better]
        going = still[live] < 10
        if not going.all():
            live, residual, slope, weight = live[going], residual[going], slope[going], weight[going]
        if not len(live):
            break
    return theta, cost


def step_of(problem, theta, residual, slope, weight, damping):
    """The damped Gauss-Newton step; a parameter at a bound that wants to leave stays."""
    weighted = slope * weight[:, None]
    normal = weighted @ slope.transpose(0, 2, 1)
    downhill = -(weighted @ residual[:, :, None])[:, :, 0]
    stays = (theta <= problem.lower) & (downhill < 0) | (theta >= problem.upper) & (downhill > 0)
    stays |= problem.lower == problem.upper
    downhill = np.where(stays, 0, downhill)
    normal = np.where(stays[:, :, None] | stays[:, None, :], 0, normal)
    diagonal = np.einsum("bii->bi", normal)
    diagonal += damping[:, None] * diagonal + 1e-12 * (1 + diagonal.max(1, keepdims=True)) + stays
    return np.linalg.solve(normal, downhill[:, :, None])[:, :, 0]


def draw_starts(random, count):
    low, high = np.array(list(STARTS.values())).T
    return low + (high - low) * random.random((count, P))


def descend(problem, target, starts):
    """Where the descents from `starts` end, the best first; that one finished by SciPy's least squares."""
    from scipy.optimize import least_squares

    theta, cost = minimise(problem, starts, target)
    theta, cost = theta[np.argsort(cost)], np.sort(cost)
    free = problem.lower < problem.upper

    def full(x):
        filled = theta[:1].copy()
        filled[0, free] = x
        return filled

    low, high = problem.lower[free], problem.upper[free]
    inside = np.clip(theta[0, free], low + 1e-9 * (high - low), high - 1e-9 * (high - low))
    robust = {} if np.isinf(problem.scale) else {"loss": "soft_l1", "f_scale": problem.scale}
    found = least_squares(lambda x: problem.residuals(full(x), target)[0][0], inside,
                          lambda x: problem.residuals(full(x), target)[1][0][free].T, bounds=(low, high), x_scale="jac",
                          ftol=1e-12, xtol=1e-12, gtol=1e-12, **robust)
    if 2 * found.cost < cost[0]:
        theta[0] = full(found.x)
    return theta


# ---------------------------------------------------------------------------------------------------------------
# the fit


@dataclass
class Settings:
    starts: int = 64
    bootstrap: int = 400
    seed: int = 1
    confidence: float = 0.95
    fixed: dict = field(default_factory=dict)  # constant -> value
    bounds: dict = field(default_factory=dict)  # exponent or e -> (low, high)
    priors: dict = field(default_factory=dict)  # constant -> (value, relative width)
    signed: bool = False  # u, w and z may be negative


@dataclass
class Fit:
    design: Design
    settings: Settings
    theta: np.ndarray  # (10,), effects in the middle
    noise: float  # standard deviation of a run's loss about the law
    seed_noise: float  # the same by the spread over seeds; 0 where that is not known
    samples: np.ndarray = None  # (bootstrap, 10), effects in the middle
    problem: Problem = None

    @property
    def constants(self):
        return self.design.middle.constants(self.theta)

    def predict(self, runs):
        return predict(self.constants, runs.N, runs.N_act, runs.L, runs.K, runs.A)


def limits(settings):
    bounds = {**BOUNDS, **({name: (-5, 5) for name in "uwz"} if settings.signed else {}), **settings.bounds,
              **{name: (value, value) for name, value in settings.fixed.items()}}
    return np.array([bounds[name] for name in NAMES], float).T


def fit(runs, settings, middle=None, ridge=False):
    """Without intervals. First by plain squares, which tell the noise, then robustly with that as the scale."""
    design = Design(runs, middle)
    target = design.whiten(runs.delta)
    random = np.random.default_rng([settings.seed, 1])
    lower, upper = limits(settings)
    free = int((lower < upper).sum())
    rough = robust_spread(runs.delta - np.median(runs.delta)) + 1e-9
    problem = Problem(design, lower, upper, ridge=0.01 * rough if ridge else 0.0)
    theta = descend(problem, target, draw_starts(random, settings.starts))
    for _ in range(2):
        noise = noise_of(design, theta[0], target, free)
        problem = Problem(design, lower, upper, 2 * noise, priors_of(settings, noise), 0.05 * noise if ridge else 0.0)
        theta = descend(problem, target, theta[:8])
    seed_noise = runs.seed_spread if runs.seed_pairs >= 2 else 0.0
    return Fit(design, settings, theta[0], noise_of(design, theta[0], target, free), seed_noise, problem=problem)


def robust_spread(values):
    return 1.4826 * float(np.median(np.abs(values)))


def noise_of(design, theta, target, free):
    """Free parameters follow some of the noise; what remains is scaled back up."""
    residual = design.whiten(design.values(theta[None], slopes=False))[0] - target
    n = len(target)
    left = np.sqrt(n / max(1, n - free))
    return max(1e-9, left * min(robust_spread(residual), np.sqrt(np.mean(residual ** 2))))


def priors_of(settings, noise):
    return [(NAMES.index(name), value, width * abs(value) / noise)
            for name, (value, width) in settings.priors.items()]


def bootstrap(found, runs):
    """Adds the samples: the law refitted to its own values plus its own residuals, drawn anew. Few runs may lie
    closer to the law than seeds to each other; the residuals are then made as large as the spread over seeds."""
    settings, design = found.settings, found.design
    random = np.random.default_rng([settings.seed, 2])
    law = design.whiten(design.values(found.theta[None], slopes=False))[0]
    residual = design.whiten(runs.delta) - law
    n, free = len(residual), int((found.problem.lower < found.problem.upper).sum())
    residual = (residual - residual.mean()) * np.sqrt(n / max(1, n - free))
    residual *= max(1.0, found.seed_noise / max(residual.std(), 1e-12))
    targets = law + residual[random.integers(n, size=(settings.bootstrap, n))]
    starts = np.repeat(found.theta[None], settings.bootstrap, axis=0)
    found.samples, _ = minimise(found.problem, starts, targets, steps=60)
    return found


def interval(samples, confidence):
    """(2, ...): the middle share of the samples."""
    return np.quantile(samples, [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
