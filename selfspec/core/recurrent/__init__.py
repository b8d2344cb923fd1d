"""Layers that keep a state instead of keys and values: how trees run over them.

A linear recurrence keeps, per head, a state S [K, V]. Node n of a tree decays the state of its parent and adds the
outer product of a key and a written value. So the state at n is the checkpoint's, decayed along the path to n, and what
each ancestor wrote, decayed since then:

    S_n = exp(G_n) S + sum over ancestors a of n, n included, of exp(G_n - G_a) k_a (x) u_a,    out_n = q_n S_n

with G_n the sum of the log decays from the checkpoint to n. One checkpoint for each row and what the nodes of a pass
wrote give the output of every node, without a state for each. What is accepted is then replayed from the same numbers
(`recurrence.advanced`), which reads no weight. Convolutions over time see the last inputs along the path
(`convolution`). The forms are those of STree (arXiv:2505.14969) and of the gated delta rule (arXiv:2412.06464).

The models' own modules compute everything else: in views their forward runs with the functions of this package in place
of transformers' kernels (`mixers`).
"""
