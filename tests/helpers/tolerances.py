"""Every tolerance of the tests of the core, in one place, each with its reason. Numbers are for float64."""

SAME_FORMULA = 1e-12
"""Two ways to write one formula: only rounding differs, a few hundred operations on numbers of order 1."""

EXACT_LIMIT = 1e-9
"""The limit beta -> 0 in forward mode against the reverse mode of BPTT: the same derivatives, K products deep, at a
steady state known to about 1e-15. 1e-9 is what the theorem is asked for; rounding alone leaves about 1e-15."""

FIRST_ORDER = 0.1
"""How far the ratio of the errors at beta and beta / 2 may lie from 2. The second-order term is of the size of beta,
a few thousandths where this is used; a zeroth- or second-order error would give a ratio of 1 or 4."""

ORDER_IN_BETA = 0.15
"""How far the ratio of the errors at beta and beta / 2 may lie from 2^N, relatively, where the error is of order N: the
next term is smaller by a power of beta, a few hundredths there, times a ratio of derivatives."""

HOLOMORPHIC = 1e-9
"""The circle of holomorphic EP against the exact derivative: beta^N is far below, rounding 1e-16 / beta adds 1e-13."""

GDU_AT_SMALL_BETA = 1e-5
"""The theorem's error at beta = 1e-6. It is about beta; rounding adds 1e-16 / beta."""

RELATIVE_AT_SMALL_BETA = 1e-3
"""The same, beside the gradient's own size: beta and the rounding 1e-10 against gradients of down to 1e-6."""

STEADY = 1e-12
"""The residual of what these tests call a steady state: the nets contract, so it stops at rounding."""

FINITE_DIFFERENCE = 1e-8
"""Central differences of the loss with h = 1e-5: h squared is 1e-10, times third derivatives of order 10; rounding
adds 1e-16 / h = 1e-11."""

SYMMETRIC_EP = 1e-7
"""EP's mean over beta = 1e-4 and -1e-4: beta squared is 1e-8, times a factor of order 1 to 10."""

ZERO_TOOTH = 1e-12
"""A saw tooth of EP in the exact limit: 0 but for the rounding of a steady state."""

SETTLED_GRADIENT = 1e-9
"""K-step sums against the whole series at a steady state: K is chosen so that the first term left out is below."""

FLOAT32 = 2e-4
"""One step in float32 against float64: 6e-8 times some tens of operations, times slopes of up to 4 and inputs of up
to about 10."""

NOT_EQUAL = 1e-2
"""The least relative gap where the theory says that two processes differ: what a wrong sign or a dropped factor of
order 1 leaves, ten million times above EXACT_LIMIT."""

TIMES_PRODUCT = 10.0
"""How many times the error of torch's own float32 matrix product a float32 update may have, parameter by parameter.
Three reasons multiply it. EP in every form subtracts two states that were rounded to float32, so that a rounding error
counts |s| / |s^beta - s*| times; energy-based nets round sigma(s) in the same way; continual EP does so at each of its
K steps. BPTT and RBP subtract nothing and have the product's error as it is. A primitive without a `contrast` of its
own subtracts sums over the batch that are |dPhi/dtheta| / |contrast| times as large: nothing is known of such a Phi by
which differences could come first."""
