"""Experts of a mixture in the dtype of autocast: an experts implementation of transformers, named "treepack".

    hidden [T, D], top_k_index [T, k], top_k_weights [T, k]
        --routing--> pairs (token, expert), sorted by expert: pair [0, S), S = T * k
        --forward--> gate and up products, activation, down product, sum over the k experts of each token --> [T, D]

    routing     the order of the pairs, and its inverse
    weights     float32 weights cast once per optimiser step
    products    grouped products in torch: any dtype, any device
    kernels     grouped products in Triton, with the gather of tokens and the activation inside
    gated       forward and backward of gated experts by these kernels
    interface   the function that transformers calls, and its registration

transformers multiplies float32 experts in float32 under autocast, because its grouped products are not known to
autocast. Here they run in the dtype of autocast, gradients of float32 weights are float32, and every sum runs in one
order, so two runs agree in every bit.
"""
