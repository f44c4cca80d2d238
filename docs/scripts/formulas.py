"""The formulas of the advantage estimators and the mismatch corrections, as the site shows them.

Each text replaces the sections ``Formula`` and ``Where`` of a docstring, whose plain text is for the terminal.
"""

from __future__ import annotations

ADVANTAGES = {
    "batch_norm": r"""
```math
A = \frac{R - \mathrm{mean}(R)}{\mathrm{std}(R) + 10^{-6}}
```

The mean and the standard deviation (with $n - 1$) are taken over the batch.
""",
    "gdpo": r"""
```math
A = \frac{S}{\mathrm{std}(S) + 10^{-6}}, \qquad S = \sum_k w_k\, \frac{r_k - \mathrm{mean}(r_k)}{\mathrm{std}(r_k) + 10^{-6}}
```

$r_k$ is a named reward and $w_k$ is its weight. The mean and the standard deviation of $r_k$ are taken over the group, and the
standard deviation of $S$ over the graded responses of the batch; both divide by $n - 1$. The mean of $S$ over the batch is 0,
because it is 0 over each group.
""",
    "gigpo": r"""
```math
A_t = R - \bar{R} + w\,(G_k - \bar{G}_k), \qquad G_k = \sum_{j \ge k} \gamma^{\,j - k}\, r_j
```

$R$ is the total reward of the response, $\bar{R}$ is its mean over the group, and $k$ is the turn of token $t$. $w$ is `weight`
and $\gamma$ is `discount`. $r_j$ is the reward of turn $j$: the sum of its per-token rewards, plus the reward of the response
in the last turn. $\bar{G}_k$ is the mean over the group's turns that began in the same state as turn $k$. A state in which only
one turn began adds 0.
""",
    "group_mean": r"""
```math
A = R - \mathrm{mean}(R)
```

The mean is taken over the group.
""",
    "group_norm": r"""
```math
A = \frac{R - \mathrm{mean}(R)}{\mathrm{std}(R) + 10^{-6}}
```

The mean and the standard deviation (with $n - 1$) are taken over the group.
""",
    "leave_one_out": r"""
```math
A_i = R_i - \frac{1}{G - 1} \sum_{j \ne i} R_j
```

$i$ and $j$ run over the $G$ responses in the group.
""",
    "max_rl": r"""
```math
A = \begin{cases}
\dfrac{R - \mathrm{mean}(R)}{\mathrm{mean}(R)} & \text{if } \mathrm{mean}(R) > 0 \\
0 & \text{otherwise}
\end{cases}
```

The mean is taken over the group.
""",
    "reverse_kl": r"""
```math
A_t = \log \pi_t^{T} - \log \pi_t^{\mathrm{old}}
```

$\pi^T$ is the teacher, `model.reference`, and $\pi^{\mathrm{old}}$ the model before the first update. $A_t$ is clamped to
$[-20, 20]$. Neither rewards nor later tokens affect $A_t$.
""",
    "gae": r"""
```math
A_t = \sum_{k \ge 0} (\gamma \lambda)^k\, \delta_{t+k}, \qquad
\delta_t = r_t + \gamma V_{t+1} - V_t, \qquad
\text{target}_t = V_t + A_t^{\lambda'}
```

$t$ counts the tokens that the model chose: an environment's tokens are skipped, and after the last token of a turn
comes the first token of the next one. $V_t$ is the critic's value before token $t$; after the last token, it is 0.
$r_t$ is the reward of token $t$, and the last token also receives $R$. $\lambda$ is `lam` or, with `lam_alpha`,
$\max(0, 1 - 1 / (\alpha L))$ for a response of $L$ steps; $\lambda'$ is `lam_returns` or $\lambda$. With `time_step`
turn, a step is a turn: $V_t$ is the value before its first token, and its tokens share $A_t$ and the target.
Whitening comes last: $A$ is replaced by $(A - \mathrm{mean}) / (\mathrm{std} + 10^{-6})$ over the tokens of the
batch.
""",
    "pass_at_k": r"""
```math
A_i = \frac{\mathop{\mathrm{mean}}_{K \ni i} M_K - \mathop{\mathrm{mean}}_{K} M_K}{\mathop{\mathrm{std}}_{K} M_K}, \qquad
M_K = \max_{j \in K} R_j
```

$K$ runs over the subsets of `k` responses in the group. $A_i = 0$ if $M_K$ is the same for all subsets.
""",
    "process": r"""
```math
A_t = \sum_{s:\ e_s \ge t} \frac{r_s - \mathrm{mean}(r)}{\mathrm{std}(r) + 10^{-6}}
```

$r_s$ is the reward of step $s$, which ends at token $e_s$. Every non-zero per-token reward ends a step, and so does the last
token, which also receives the reward of the whole response. The mean and the standard deviation (with $n - 1$) are taken over
the step rewards of all responses in the group. If all step rewards in a group are equal, $A_t = 0$.
""",
    "raw": r"""
```math
A = R
```
""",
}

CORRECTIONS = {
    "icepop": r"""
```math
w = \begin{cases}
\rho & \text{if } \ell \le \rho \le h \\
0 & \text{otherwise}
\end{cases}
```

$\ell$ is `low` and $h$ is `high`.
""",
    "length_fair": r"""
```math
w = \begin{cases}
1 & \text{if } \Bigl\lvert \sum_t \log \rho_t \Bigr\rvert \le c \sqrt{L} \\
0 & \text{otherwise}
\end{cases}
```

$L$ is the length of the response in tokens, and $c$ is `width`.
""",
    "mis": r"""
```math
w = \begin{cases}
\rho & \text{if } \rho \le h \\
0 & \text{otherwise}
\end{cases}
```

$h$ is `high`.
""",
    "tis": r"""
```math
w = \min(\rho,\ h)
```

$h$ is `high`.
""",
    "trm": r"""
```math
w = \begin{cases}
1 & \text{if } \max_t \tfrac{1}{2} l_t^2 \le d_{\max} \text{ and }
\mathop{\mathrm{mean}}_t\, (e^{l_t} - 1 - l_t) \le d_{\mathrm{mean}} \\
0 & \text{otherwise}
\end{cases}
```

$l_t = \log \rho_t$ is the log-ratio of the sampled token, $d_{\max}$ is `max_divergence`, and $d_{\mathrm{mean}}$ is
`mean_divergence`. The paper computes the KL over the whole vocabulary. This correction estimates it from the sampled token,
with k2 for the maximum and k3 for the mean, as the paper recommends.
""",
    "tv_gate": r"""
```math
w_t = \begin{cases}
0 & \text{if } D > \delta \text{ and } A_t \log \rho_t > 0 \\
\min(\rho_t,\ h) & \text{otherwise}
\end{cases}
\qquad D = \mathop{\mathrm{mean}}_t\, \lvert \rho_t - 1 \rvert
```

The mean is taken over the tokens of the response. $\delta$ is `threshold` and $h$ is `high`.
""",
}
