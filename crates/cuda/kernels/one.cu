// Products of weight matrices with one row of activations, on the tensor cores, for types whose weights are exact there.
//
// Nothing is lost: the row is split into two rows, its activations as f16 and their remainders. The warps of a block
// share the columns. Each loads its part of the activations to shared memory on its own, and the sums are combined
// there.

#include "matrix.cuh"
#include "vector.cuh"
#include "tensor.cuh"
#include "few.cuh"

// The remainders of eight activations that do not fit f16, after division by a power of two.
__device__ inline Loaded missing(const Loaded& x, float power) {
    float inverse = 1 / power;
    auto rest = [&](float v) { return v * inverse - half_to_float(float_to_half(v * inverse)); };
    return Loaded{{rest(x.first.x), rest(x.first.y), rest(x.first.z), rest(x.first.w)},
                  {rest(x.second.x), rest(x.second.y), rest(x.second.z), rest(x.second.w)}};
}

// The two rows in shared memory.
struct Two {
    uint4* eights;
    u16* sums;
    u32 stride, sums_stride;

    __device__ inline Two(uint4* staged, u32 strips) {
        stride = EIGHTS * strips + 1, sums_stride = 4 * (strips | 1);
        eights = staged, sums = (u16*)(staged + 2 * stride);
    }
    // The first byte after them.
    __device__ inline float* end() const { return (float*)(sums + 2 * 4 * sums_stride); }
    // There are only two tokens. The others of a tile repeat them.
    __device__ inline Activations activations() const {
        u32 token = threadIdx.x % WARP / 4 % 2;
        return Activations{eights + token * stride, (const uint2*)sums + token * sums_stride, stride, sums_stride};
    }
    // Loads the activations of some strips, as one warp; `load` returns eight of them. If a part's activations are too
    // large for f16, they are divided by a power of two, which is returned.
    template <class Load> __device__ inline float stage_share(u32 first_strip, u32 strips, Load load) const {
        float power = 1;
        for (int time = 0; time < 2; time++) {
            float largest = 0;
            for (u32 i = EIGHTS * first_strip + threadIdx.x % WARP; i < EIGHTS * (first_strip + strips); i += WARP) {
                Loaded loaded = load(i, time == 0);
                largest = fmaxf(largest, stage(Eight{0, i, eights, sums}, loaded, power));
                stage(Eight{0, i, eights + stride, sums + 4 * sums_stride}, missing(loaded, power), 1);
            }
            if (!__any_sync(ALL_LANES, largest > MOST_HALF)) break;
            power = power_for(warp_max(largest));
        }
        __syncwarp();
        return power;
    }
    // Eight of them with their original values, except for the power of two.
    __device__ inline Loaded eight(u32 i) const {
        uint4 upper = eights[place(i)], lower = eights[stride + place(i)];
        auto at = [&](int word, int shift) {
            return half_to_float(word_of(upper, word) >> shift & 0xffff) +
                   half_to_float(word_of(lower, word) >> shift & 0xffff);
        };
        return Loaded{{at(0, 0), at(1, 0), at(0, 16), at(1, 16)}, {at(2, 0), at(3, 0), at(2, 16), at(3, 16)}};
    }
};

// A warp's part of the strips.
struct Strips {
    u32 first, count;
    __device__ inline Strips(u32 strips) {
        u32 share = (strips + WARPS - 1) / WARPS;
        first = min(threadIdx.x / WARP * share, strips), count = min(share, strips - first);
    }
};

// out[y][r] = activation(gate[r] . x, up[r] . x), for two matrices of the same kind.
__device__ inline void gate_up_of_one(const GateUpArgs& a) {
    await_previous();
    extern __shared__ uint4 staged[];
    const Mat& m = a.gate;
    u32 y = blockIdx.y, expert = a.experts[y], first_row = blockIdx.x * a.turns * 8;
    u64 slot = slot_of(m, expert);
    if (absent(m, slot)) return;
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, all = m.cols / STRIP;
    Two two(staged, all);
    Strips strips(all);
    float* parts = two.end(); // [turns, 2, WARPS, 8]
    Rows rows = {&m, &a.up, slot, first_row, 8, strips.first, strips.count};
    u32 turns = min(a.turns, (m.rows - first_row + 7) / 8);

    float power;
    auto prepare = [&]() {
        if (a.ahead && threadIdx.x == 0) {
            fetch_rows(m, slot, first_row, 8 * a.turns);
            fetch_rows(a.up, slot, first_row, 8 * a.turns);
            // The next kernel cannot begin before this one ends, and memory would be idle meanwhile.
            u32 next = (a.next.rows + gridDim.x - 1) / gridDim.x;
            fetch_rows(a.next, slot, blockIdx.x * next, next);
        }
        const float4* from = (const float4*)(a.x + (u64)(y / a.share) * a.x_width);
        auto load = [&](u32 i, bool) { return Loaded{from[2 * i], from[2 * i + 1]}; };
        power = two.stage_share(strips.first, strips.count, load);
    };
    Activations x = two.activations();
    auto done = [&](u32 turn, float (&sum)[1][4]) {
        // These lanes have both tokens' sums.
        if (lane % 4) return;
        float* to = parts + (turn * 2 * WARPS + warp) * 8 + lane / 4;
        to[0] = (sum[0][0] + sum[0][1]) * power;
        to[8 * WARPS] = (sum[0][2] + sum[0][3]) * power;
    };
#define BODY(KIND)                                                                                                     \
    if constexpr (KIND == Q4_K || KIND == Q5_K) pass<Exact<KIND>, 1, true>(rows, turns, prepare, x, done)
    WITH_KIND(m.kind, BODY)
#undef BODY
    __syncthreads();
    for (u32 i = threadIdx.x; i < 8 * turns; i += THREADS) {
        u32 r = first_row + i;
        if (r >= m.rows) return;
        const float* from = parts + i / 8 * 2 * WARPS * 8 + i % 8;
        u64 at = (u64)expert * m.rows + r;
        float gate = a.gate_bias ? a.gate_bias[at] : 0, up = a.up_bias ? a.up_bias[at] : 0;
#pragma unroll
        for (int part = 0; part < WARPS; part++) gate += from[8 * part], up += from[8 * (WARPS + part)];
        a.out[(u64)y * m.rows + r] = activate(gate, up, a.activation);
    }
}

// out[r] = w[r] . x, optionally after a sum and a norm, which the first block stores.
__device__ inline void product_of_one(const MatvecArgs& a) {
    extern __shared__ uint4 staged[];
    __shared__ float squares[WARPS];
    Which which = which_of(a.blocks);
    const Mat& m = a.w[which.number];
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, all = m.cols / STRIP;
    Two two(staged, all);
    Strips strips(all);
    float* parts = two.end(); // [turns, WARPS, 16]
    u32 first_row = (blockIdx.x - which.start) * a.turns * 16;
    u32 turns = min(a.turns, (m.rows - first_row + 15) / 16);
    Rows rows = {&m, &m, 0, first_row, 16, strips.first, strips.count};
    bool keep = blockIdx.x == 0 && a.norm.w;

    float power;
    auto prepare = [&]() {
        if (a.ahead && threadIdx.x == 0) fetch_rows(m, 0, first_row, 16 * a.turns);
        if (a.norm.w && 32 * threadIdx.x < m.cols) fetch_ahead(a.norm.w + 32 * threadIdx.x);
        await_previous();
        float mine = 0;
        auto load = [&](u32 i, bool first_time) {
            auto eight = [&](const float* from) {
                return Loaded{((const float4*)from)[2 * i], ((const float4*)from)[2 * i + 1]};
            };
            Loaded x = eight(a.x), y = {{0, 0, 0, 0}, {0, 0, 0, 0}}, w = {{1, 1, 1, 1}, {1, 1, 1, 1}};
            if (a.norm.added) y = eight(a.norm.added);
            if (a.norm.w) w = eight(a.norm.w);
            float4 p = x.first, q = x.second;
            p.x += y.first.x, p.y += y.first.y, p.z += y.first.z, p.w += y.first.w;
            q.x += y.second.x, q.y += y.second.y, q.z += y.second.z, q.w += y.second.w;
            if (first_time) {
                mine += p.x * p.x + p.y * p.y + p.z * p.z + p.w * p.w;
                mine += q.x * q.x + q.y * q.y + q.z * q.z + q.w * q.w;
                if (keep && a.norm.added) ((float4*)a.norm.sum)[2 * i] = p, ((float4*)a.norm.sum)[2 * i + 1] = q;
            }
            return Loaded{{p.x * w.first.x, p.y * w.first.y, p.z * w.first.z, p.w * w.first.w},
                          {q.x * w.second.x, q.y * w.second.y, q.z * w.second.z, q.w * w.second.w}};
        };
        power = two.stage_share(strips.first, strips.count, load);
        mine = warp_sum(mine);
        if (lane == 0) squares[warp] = mine;
    };
    auto done = [&](u32 turn, float (&sum)[1][4]) {
        // These lanes have both tokens' sums.
        if (lane % 4) return;
        float* to = parts + (turn * WARPS + warp) * 16 + lane / 4;
        to[0] = (sum[0][0] + sum[0][1]) * power;
        to[8] = (sum[0][2] + sum[0][3]) * power;
    };
    Activations x = two.activations();
#define BODY(KIND)                                                                                                     \
    if constexpr (KIND == Q4_K || KIND == Q5_K || KIND == Q6_K)                                                       \
    pass<Exact<KIND>, 1, false>(rows, turns, prepare, x, done)
    WITH_KIND(m.kind, BODY)
#undef BODY
    __syncthreads();
    float factor = 1;
    if (a.norm.w) {
        float total = 0;
#pragma unroll
        for (int i = 0; i < WARPS; i++) total += squares[i];
        factor = 1 / sqrtf(total / m.cols + a.norm.eps);
    }
    for (u32 i = threadIdx.x; i < 16 * turns; i += THREADS) {
        if (first_row + i >= m.rows) break;
        const float* from = parts + i / 16 * WARPS * 16 + i % 16;
        const float* bias = a.bias[which.number];
        float sum = 0;
#pragma unroll
        for (int part = 0; part < WARPS; part++) sum += from[16 * part];
        a.out[which.number][first_row + i] = fmaf(sum, factor, bias ? bias[first_row + i] : 0);
    }
    if (!keep) return;
    for (u32 i = EIGHTS * strips.first + lane; i < EIGHTS * (strips.first + strips.count); i += WARP) {
        Loaded v = two.eight(i);
        float f = power * factor;
        float4* to = (float4*)a.norm.normed + 2 * i;
        to[0] = float4{v.first.x * f, v.first.y * f, v.first.z * f, v.first.w * f};
        to[1] = float4{v.second.x * f, v.second.y * f, v.second.z * f, v.second.w * f};
    }
}

// This many threads would have 168 registers each, which leaves space on the multiprocessor for the kernels before and
// after.
#define THREADS_WITH_ROOM 384

extern "C" __global__ void __launch_bounds__(THREADS, 2) gate_up_one(const GateUpArgs a) { gate_up_of_one(a); }
extern "C" __global__ void __launch_bounds__(THREADS_WITH_ROOM, 1) product_one(const MatvecArgs a) { product_of_one(a); }
