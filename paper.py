"""
What the paper printed, as data, to set beside our numbers; tab:... is its label of a table. And what the
runs that its authors published show of the mean embedding.
"""


def table(text):
    """A block of text, its first line naming the columns, as a dict (row, column) -> number."""
    header, *lines = (line.split() for line in text.strip().splitlines())
    return {(line[0], column): float(value) for line in lines
            for column, value in zip(header[1:], line[1:], strict=True)}


# Learning rate sensitivity by weight tying: the sum over the learning rates / (their number - 1).
LRS = {
    0: table("""
        N     baseline  weight_decay  z_loss  soft_capping  mu_loss  mu_centering
        16M   0.306     0.211         0.054   0.032         0.031    0.028
        29M   0.391     0.381         0.033   0.024         0.027    0.029
        57M   0.508     0.102         0.235   0.035         0.031    0.041
        109M  0.344     0.231         0.118   0.050         0.046    0.051
        221M  0.412     0.253         0.109   0.073         0.056    0.061"""),  # tab:wortsman_lrs
    1: table("""
        N     baseline  weight_decay  z_loss  soft_capping  mu_loss  mu_centering
        16M   0.050     0.114         0.056   0.041         0.022    0.034
        29M   0.061     0.054         0.042   0.030         0.026    0.042
        57M   0.308     0.288         0.103   0.031         0.038    0.042
        109M  0.335     0.074         0.083   0.049         0.053    0.061
        221M  0.330     0.356         0.109   0.055         0.058    0.066"""),  # tab:wortsman_lrs_wt
}

# The same for other λ, untied: tab:overview_comparison.
LRS_OF_LAM = {
    'mu_loss': table("""
        N     1e-07  0.0001  0.1    100
        16M   0.182  0.031   0.031  0.054
        29M   0.052  0.027   0.034  0.040
        57M   0.110  0.031   0.038  0.033
        109M  0.125  0.046   0.048  0.034
        221M  0.129  0.056   0.056  0.055"""),
    'z_loss': table("""
        N     1e-07  0.0001  0.1    100
        16M   0.037  0.054   0.032  1.156
        29M   0.044  0.033   0.043  1.780
        57M   0.107  0.235   0.047  1.392
        109M  0.076  0.118   0.059  2.150
        221M  0.131  0.109   0.101  2.166"""),
}

# Additional training time over the baseline in percent, by weight tying: tab:overview_training_time.
OVERHEAD = {
    0: table("""
        N     weight_decay  z_loss  soft_capping  mu_loss  mu_centering
        16M   -1.0          6.4     10.0          0.4      0.6
        29M   -0.5          4.3     6.4           0.7      0.5
        57M   -0.3          2.5     3.9           0.6      0.4
        109M  -0.5          1.5     2.0           0.4      0.4
        221M  -0.7          0.8     0.7           0.2      0.3"""),
    1: table("""
        N     weight_decay  z_loss  soft_capping  mu_loss  mu_centering
        16M   0.4           6.6     11.2          0.5      0.7
        29M   0.0           4.0     7.1           0.4      0.5
        57M   0.2           2.7     4.5           0.8      0.7
        109M  0.1           1.8     2.8           0.4      0.6
        221M  0.1           1.0     1.4           0.0      0.2"""),
}

# From the runs that the authors published, untied, by size and learning rate: the mu_norm of baseline, which
# is the norm of its mean embedding after training, and its test_loss minus that of mu_centering.
MU_NORM = table("""
    N     0.0003  0.001  0.003  0.01    0.03    0.1      0.3
    16M   1.435   2.212  5.806  20.212  56.652  187.225  331.471
    29M   1.331   2.137  5.885  19.942  63.188  192.094  321.511
    57M   1.114   1.865  6.368  18.563  79.721  144.418  359.240
    109M  1.167   2.400  8.126  19.849  72.207  146.293  467.200
    221M  1.204   2.337  5.625  20.019  75.824  209.223  446.517""")
EXCESS = table("""
    N     0.0003  0.001   0.003  0.01    0.03   0.1    0.3
    16M   -0.001  0.000   0.000  -0.001  0.014  0.425  1.223
    29M   0.000   0.001   0.005  0.005   0.014  0.704  1.508
    57M   -0.001  0.000   0.004  0.003   0.018  0.217  2.584
    109M  -0.001  -0.002  0.001  0.001   0.004  0.087  1.676
    221M  -0.001  -0.001  0.000  0.003   0.040  0.178  1.891""")

RANKING = 'μ-centering ≈ μ-loss ≈ logit soft-capping > z-loss > weight decay > baseline'  # Eq. 22

# name: intervention, means, symmetry, anisotropy suppression: tab:regularization_methods_effect
METHODS = {
    'soft_capping': ('model', 'element-wise transformation', 'yes', 'no'),
    'weight_decay': ('training', 'loss regularization', 'yes', 'no'),
    'z_loss': ('training', 'loss regularization', 'no', 'no'),
    'mu_loss': ('training', 'loss regularization', 'yes', 'yes'),
    'mu_centering': ('training', 'parameter shift', 'yes', 'yes'),
}

# What the table calls it, the paper's value, and its name in config.json, or None if it is fixed in the code:
# tab:model_architecture
HYPERPARAMETERS = (
    ('optimizer', 'AdamW', None),
    ('β1', 0.9, 'beta1'),
    ('β2', 0.95, 'beta2'),
    ('ε', 1e-8, 'eps'),
    ('weight decay', 0.0, None),
    ('gradient clipping', 1.0, 'grad_clip'),
    ('dropout', 0.0, None),
    ('weight tying', 'false, true', 'weight_tying'),
    ('qk-layernorm', 'yes', None),
    ('bias', 'no', None),
    ('learning rate schedule', 'cosine decay', None),
    ('learning rate minimum', 1e-5, 'min_lr'),
    ('layer normalization', 'LayerNorm', None),
    ('precision', 'bfloat16', 'dtype'),
    ('precision of the logits', 'bfloat16', 'logits_dtype'),  # BF16 in the paper's table means all of it
    ('positional embedding', 'RoPE', None),
    ('vocab size', 50304, 'vocab_size'),
    ('hidden activation', 'SwiGLU', None),
    ('sequence length', 2048, 'block_size'),
    ('batch size (samples)', 64, 'batch_size'),
    ('batch size (tokens)', 131072, 'batch_size * block_size'),
    ('training length (steps)', 100000, 'steps'),
    ('warmup (steps)', 5000, 'warmup'),
    ('embedding initialization', 'Normal, standard deviation 1/√d', None),
    ('weight initialization', 'Xavier, average of fan_in and fan_out', None),
)
