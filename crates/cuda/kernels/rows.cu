// Operations on rows of activations.

#include "matrix.cuh"

struct NormArgs {
    const float* x;
    const float* w;
    float* out;
    u32 width; // floats that are normed together: a row or a part of one
    float eps;
    float* sum;         // x is added to this first, and the sum is stored here; or null
};

// out = norm(x) * w, over rows or parts of rows; one block each.
extern "C" __global__ void rms_norm(const NormArgs a) {
    await_previous();
    u64 at = (u64)blockIdx.x * a.width;
    const float* x = a.x + at;
    float* sum = a.sum ? a.sum + at : 0;
    float squares = 0;
    if (a.width == 4 * blockDim.x) {
        // Every thread has four, so memory is read in one go.
        float4 v = ((const float4*)x)[threadIdx.x], w = ((const float4*)a.w)[threadIdx.x];
        if (sum) {
            float4 s = ((float4*)sum)[threadIdx.x];
            v.x += s.x, v.y += s.y, v.z += s.z, v.w += s.w;
            ((float4*)sum)[threadIdx.x] = v;
        }
        squares = v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        float scale = 1 / sqrtf(block_sum(squares) / a.width + a.eps);
        ((float4*)(a.out + at))[threadIdx.x] =
            float4{v.x * scale * w.x, v.y * scale * w.y, v.z * scale * w.z, v.w * scale * w.w};
        return;
    }
    if (sum) {
        for (u32 i = threadIdx.x; i < a.width; i += blockDim.x) {
            sum[i] += x[i];
            squares = fmaf(sum[i], sum[i], squares);
        }
        x = sum;
    } else {
        for (u32 i = threadIdx.x; i < a.width; i += blockDim.x) squares = fmaf(x[i], x[i], squares);
    }
    float scale = 1 / sqrtf(block_sum(squares) / a.width + a.eps);
    for (u32 i = threadIdx.x; i < a.width; i += blockDim.x) a.out[at + i] = x[i] * scale * a.w[i];
}

struct LayerNormArgs {
    const float* x;
    const float* w;
    float* out;
    u32 width;
    float eps;
};

// out = (x - mean) / sqrt(variance + eps) * w, over rows; one block each.
extern "C" __global__ void layer_norm(const LayerNormArgs a) {
    await_previous();
    const float* x = a.x + (u64)blockIdx.x * a.width;
    float sum = 0, squares = 0;
    for (u32 i = threadIdx.x; i < a.width; i += blockDim.x) sum += x[i];
    float mean = block_sum(sum) / a.width;
    for (u32 i = threadIdx.x; i < a.width; i += blockDim.x) squares = fmaf(x[i] - mean, x[i] - mean, squares);
    float scale = 1 / sqrtf(block_sum(squares) / a.width + a.eps);
    float* out = a.out + (u64)blockIdx.x * a.width;
    for (u32 i = threadIdx.x; i < a.width; i += blockDim.x) out[i] = (x[i] - mean) * scale * a.w[i];
}

struct PairArgs {
    float* x;
    const float* y;
    u64 count;
    u32 width; // of x
    u32 other; // of y, if it differs
};

extern "C" __global__ void add(const PairArgs a) {
    await_previous();
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < a.count) a.x[i] += a.y[i];
}

// x[t] += y
extern "C" __global__ void add_bias(const PairArgs a) {
    await_previous();
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < a.count) a.x[i] += a.y[i % a.width];
}

// x[t] *= y, which has a number for each of a row, or one for all.
extern "C" __global__ void scale(const PairArgs a) {
    await_previous();
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < a.count) a.x[i] *= a.y[a.other == 1 ? 0 : i % a.width];
}

// The order is that of `gate` in mod.rs.
enum GateKind { SIGMOID, SOFTPLUS, FACTOR };

struct GateArgs {
    PairArgs pair;
    u32 kind;
};

// x *= function(y). A row of y has `other` numbers, and each applies to width / other numbers of x.
extern "C" __global__ void gate(const GateArgs a) {
    await_previous();
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= a.pair.count) return;
    float y = a.pair.y[i / (a.pair.width / a.pair.other)];
    a.pair.x[i] *= a.kind == SIGMOID ? sigmoid(y) : a.kind == SOFTPLUS ? softplus(y) : y;
}

struct ActivateArgs {
    PairArgs pair;
    Activation activation;
};

// x = activation(x, y)
extern "C" __global__ void activate_all(const ActivateArgs a) {
    await_previous();
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < a.pair.count) a.pair.x[i] = activate(a.pair.x[i], a.pair.y[i], a.activation);
}

struct CapArgs {
    float* x;
    u64 count;
    float cap;
};

// x = cap * tanh(x / cap)
extern "C" __global__ void softcap(const CapArgs a) {
    await_previous();
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < a.count) a.x[i] = a.cap * tanhf(a.x[i] / a.cap);
}

struct WeighArgs {
    const float* x;      // [rows, width]
    const float* logits; // [rows, experts]
    float* out;          // [rows, width]
    u32 width, experts;
};

// out[t] = x[t] * sigmoid(max(logits[t])); one block per row.
extern "C" __global__ void weigh_by_best(const WeighArgs a) {
    await_previous();
    u64 row = blockIdx.x;
    float best = -INFINITE;
    for (u32 i = threadIdx.x; i < a.experts; i += blockDim.x) best = fmaxf(best, a.logits[row * a.experts + i]);
    float factor = sigmoid(block_max(best));
    for (u32 i = threadIdx.x; i < a.width; i += blockDim.x) a.out[row * a.width + i] = a.x[row * a.width + i] * factor;
}

struct ActivateRowsArgs {
    float* gate; // [rows, width]
    const float* up;
    u32 width;
    Activation activation;
    const u32* experts; // of each row
    const u64* slots;   // [experts] the address of each expert's slot, 0 if it has none
};

// gate = activation(gate, up), in the rows whose expert has a slot; one block per row.
extern "C" __global__ void activate_rows(const ActivateRowsArgs a) {
    await_previous();
    u64 row = blockIdx.x;
    if (!a.slots[a.experts[row]]) return;
    for (u32 i = threadIdx.x; i < a.width; i += blockDim.x) {
        u64 at = row * a.width + i;
        a.gate[at] = activate(a.gate[at], a.up[at], a.activation);
    }
}

struct AddRowsArgs {
    float* x; // [rows, width]
    const float* y;
    u32 width;
    float factor;
    const u32* experts; // of each row
    const u64* slots;   // [experts] the address of each expert's slot, 0 if it has none
};

// x += factor * y, in the rows whose expert has a slot; one block per row.
extern "C" __global__ void add_rows(const AddRowsArgs a) {
    await_previous();
    u64 row = blockIdx.x;
    if (!a.slots[a.experts[row]]) return;
    for (u32 i = threadIdx.x; i < a.width; i += blockDim.x) {
        u64 at = row * a.width + i;
        a.x[at] = fmaf(a.factor, a.y[at], a.x[at]);
    }
}

struct AnglesArgs {
    const float* frequencies;
    const float* divisors; // or null
    const u32* positions;
    float* out; // [rows, cos... | sin...]
    u32 half;
    float scale;
};

// The product is rounded to f32, as in the models' training.
extern "C" __global__ void rope_angles(const AnglesArgs a) {
    await_previous();
    u32 row = blockIdx.x;
    for (u32 i = threadIdx.x; i < a.half; i += blockDim.x) {
        float frequency = a.divisors ? a.frequencies[i] / a.divisors[i] : a.frequencies[i];
        double angle = __fmul_rn((float)a.positions[row], frequency);
        a.out[(u64)row * 2 * a.half + i] = (float)cos(angle) * a.scale;
        a.out[(u64)row * 2 * a.half + a.half + i] = (float)sin(angle) * a.scale;
    }
}

struct RopeArgs {
    float* x;
    const float* angles;
    u32 width, head_dim, half;
    u32 interleaved;
};

// Rotates every head of a row by the row's angles.
extern "C" __global__ void rope(const RopeArgs a) {
    await_previous();
    u32 row = blockIdx.y;
    u32 at = blockIdx.x * blockDim.x + threadIdx.x;
    u32 head = at / a.half, i = at % a.half;
    if (head >= a.width / a.head_dim) return;
    const float* angles = a.angles + (u64)row * 2 * a.half;
    float cosine = angles[i], sine = angles[a.half + i];
    float* x = a.x + (u64)row * a.width + head * a.head_dim;
    u32 first = a.interleaved ? 2 * i : i, second = a.interleaved ? 2 * i + 1 : i + a.half;
    float p = x[first], q = x[second];
    x[first] = p * cosine - q * sine;
    x[second] = q * cosine + p * sine;
}

#define MOST_BUFFERS 2

struct HeadsArgs {
    float* x[MOST_BUFFERS];
    const float* w[MOST_BUFFERS]; // of the norms, or null
    u32 heads[MOST_BUFFERS];
    const float* angles;
    u32 dim, half;
    u32 interleaved;
    float eps;
};

// Norms and rotates heads of several buffers; one warp per head of a row.
extern "C" __global__ void norm_and_rotate(const HeadsArgs a) {
    await_previous();
    u32 lane = threadIdx.x % WARP, row = blockIdx.y;
    u32 head = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    u32 which = head >= a.heads[0];
    if (which) head -= a.heads[0];
    if (head >= a.heads[which]) return;
    float* x = a.x[which] + ((u64)row * a.heads[which] + head) * a.dim;
    const float* w = a.w[which];
    float scale = 1;
    if (w) {
        float squares = 0;
        for (u32 i = lane; i < a.dim; i += WARP) squares = fmaf(x[i], x[i], squares);
        scale = 1 / sqrtf(warp_sum(squares) / a.dim + a.eps);
    }
    const float* angles = a.angles + (u64)row * 2 * a.half;
    for (u32 i = lane; i < a.half; i += WARP) {
        u32 first = a.interleaved ? 2 * i : i, second = a.interleaved ? 2 * i + 1 : i + a.half;
        float cosine = angles[i], sine = angles[a.half + i];
        float p = w ? x[first] * scale * w[first] : x[first];
        float q = w ? x[second] * scale * w[second] : x[second];
        x[first] = p * cosine - q * sine;
        x[second] = q * cosine + p * sine;
    }
    if (w)
        for (u32 i = 2 * a.half + lane; i < a.dim; i += WARP) x[i] = x[i] * scale * w[i];
}

struct UngroupArgs {
    const float* x;
    float* to;
    u32 x_width, to_width;
    u32 group, first, part; // floats of a group, where the part starts in it, and its length
    u32 at;                 // where the parts go in a row
    u32 count;              // floats of all parts of a row
};

extern "C" __global__ void ungroup(const UngroupArgs a) {
    await_previous();
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= a.count) return;
    u64 row = blockIdx.y;
    a.to[row * a.to_width + a.at + i] = a.x[row * a.x_width + i / a.part * a.group + a.first + i % a.part];
}

struct PickArgs {
    const float* x;
    float* out;
    const u32* rows;
    u32 width;
};

// out[i] = x[rows[i]]
extern "C" __global__ void pick(const PickArgs a) {
    await_previous();
    u64 from = (u64)a.rows[blockIdx.x] * a.width, to = (u64)blockIdx.x * a.width;
    for (u32 i = threadIdx.x; i < a.width; i += blockDim.x) a.out[to + i] = a.x[from + i];
}

struct CopyArgs {
    const float* from;
    float* to;
    u64 count;
};

extern "C" __global__ void copy(const CopyArgs a) {
    await_previous();
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < a.count) a.to[i] = a.from[i];
}
