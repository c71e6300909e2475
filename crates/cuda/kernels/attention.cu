// Attention over keys and values in pages, of any shape and type.

#include "matrix.cuh"
#include "pages.cuh"

#define THREADS 256
#define WARPS (THREADS / WARP)
// Keys in shared memory at a time.
#define KEYS 32
// The most channels of a value per lane.
#define MOST_VALUES 16

struct AppendArgs {
    KvArgs kv;
    const float* k; // [rows, heads * own channels of a key]
    const float* v; // [rows, heads * value_dim]
};

__device__ inline void store(u8* page, u32 single, u64 i, float x) {
    if (single) ((float*)page)[i] = x;
    else ((u16*)page)[i] = float_to_half(x);
}

extern "C" __global__ void append(const AppendArgs a) {
    await_previous();
    u32 row = blockIdx.x;
    u32 position = a.kv.position[row];
    u8* page = a.kv.pages[(u64)a.kv.sequence[row] * a.kv.capacity + position / PAGE];
    u32 place = position % PAGE;
    u32 own = a.kv.latent ? a.kv.key_dim - a.kv.value_dim : a.kv.key_dim;
    u64 values = (u64)a.kv.heads * PAGE * a.kv.key_dim;
    for (u32 i = threadIdx.x; i < a.kv.heads * own; i += blockDim.x) {
        u64 at = (u64)(i / own * PAGE + place) * a.kv.key_dim + i % own;
        store(page, a.kv.single, at, a.k[(u64)row * a.kv.heads * own + i]);
    }
    for (u32 i = threadIdx.x; i < a.kv.heads * a.kv.value_dim; i += blockDim.x) {
        u32 head = i / a.kv.value_dim, channel = i % a.kv.value_dim;
        u64 at = a.kv.latent ? (u64)(head * PAGE + place) * a.kv.key_dim + own + channel
                             : values + (u64)(head * PAGE + place) * a.kv.value_dim + channel;
        store(page, a.kv.single, at, a.v[(u64)row * a.kv.heads * a.kv.value_dim + i]);
    }
}

struct AttendArgs {
    KvArgs kv;
    const float* q;     // [rows, q_heads * key_dim]
    float* out;         // [rows, q_heads * value_dim], if there is one split
    float* partial;     // [splits, rows, q_heads, value_dim + 2], if there are several: out, max, sum
    const float* sinks; // [q_heads], or null
    u32 q_heads, rows, splits;
    u32 staged; // whether values are loaded to shared memory
    float scale;
};

template <class T> __device__ inline float number(T x);
template <> __device__ inline float number(float x) { return x; }
template <> __device__ inline float number(u16 x) { return half_to_float(x); }

// Bytes between keys in shared memory: an odd multiple of 16, so that keys are in different banks.
__device__ inline u32 key_bytes(u32 dim, u32 size) { return (dim * size / 16 + 1 | 1) * 16; }

// A block computes one row and up to WARPS query heads of one key head, one per warp. blockIdx.z is the split of the
// positions.
template <class T> __device__ inline void attend(const AttendArgs& a) {
    await_previous();
    extern __shared__ __align__(16) u8 shared[];
    u32 key_dim = a.kv.key_dim, value_dim = a.kv.value_dim;
    u32 group = a.q_heads / a.kv.heads, blocks = (group + WARPS - 1) / WARPS;
    u32 kv_head = blockIdx.x / blocks;
    u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    u32 in_group = blockIdx.x % blocks * WARPS + warp;
    bool active = in_group < group;
    u32 head = kv_head * group + (active ? in_group : 0);
    u32 row = blockIdx.y, split = blockIdx.z;

    u32 stride = key_bytes(key_dim, sizeof(T));
    u8* keys = shared;
    T* values = (T*)(shared + KEYS * stride);
    float* queries = (float*)(values + (a.staged ? KEYS * value_dim : 0));
    float* query = queries + warp * key_dim;
    const float* raw_query = a.q + ((u64)row * a.q_heads + head) * key_dim;
    for (u32 i = lane; i < key_dim; i += WARP) query[i] = raw_query[i];

    u32 end = a.kv.position[row] + 1;
    u32 start = a.kv.start(end);
    // Splits are whole tiles.
    u32 first_tile = start / KEYS, tiles = (end + KEYS - 1) / KEYS - first_tile;
    u32 share = (tiles + a.splits - 1) / a.splits;
    u32 from = first_tile + min(split * share, tiles), to = first_tile + min((split + 1) * share, tiles);
    u8* const* pages = a.kv.pages + (u64)a.kv.sequence[row] * a.kv.capacity;
    u32 own = key_dim - value_dim;

    float max = -INFINITE, sum = 0;
    float acc[MOST_VALUES];
#pragma unroll
    for (int i = 0; i < MOST_VALUES; i++) acc[i] = 0;

    for (u32 tile = from; tile < to; tile++) {
        u32 position = tile * KEYS;
        const T* page = (const T*)pages[position / PAGE];
        const T* k = page + (u64)(kv_head * PAGE + position % PAGE) * key_dim;
        __syncthreads();
        if (key_dim * sizeof(T) % 16 == 0) {
            u32 chunks = key_dim * sizeof(T) / 16;
            for (u32 i = threadIdx.x; i < KEYS * chunks; i += THREADS)
                *(uint4*)(keys + i / chunks * stride + i % chunks * 16) = ((const uint4*)k)[i];
        } else {
            for (u32 i = threadIdx.x; i < KEYS * key_dim; i += THREADS)
                *(T*)(keys + i / key_dim * stride + i % key_dim * sizeof(T)) = k[i];
        }
        const T* v = page + (u64)a.kv.heads * PAGE * key_dim + (u64)(kv_head * PAGE + position % PAGE) * value_dim;
        if (a.staged) {
            if (value_dim * sizeof(T) % 16 == 0) {
                u32 chunks = KEYS * value_dim * sizeof(T) / 16;
#pragma unroll 4
                for (u32 i = threadIdx.x; i < chunks; i += THREADS) ((uint4*)values)[i] = ((const uint4*)v)[i];
            } else {
                for (u32 i = threadIdx.x; i < KEYS * value_dim; i += THREADS) values[i] = v[i];
            }
        }
        __syncthreads();
        if (!active) continue;

        // Scores: one lane per key.
        const T* key = (const T*)(keys + lane * stride);
        float score = 0;
        if (key_dim % 8 == 0) {
            for (u32 i = 0; i < key_dim; i += 8) {
                T k8[8];
#pragma unroll
                for (int j = 0; j < 8 * sizeof(T) / 16; j++) ((uint4*)k8)[j] = ((const uint4*)(key + i))[j];
                float4 q0 = *(const float4*)(query + i), q1 = *(const float4*)(query + i + 4);
                score = fmaf(q0.x, number(k8[0]), score);
                score = fmaf(q0.y, number(k8[1]), score);
                score = fmaf(q0.z, number(k8[2]), score);
                score = fmaf(q0.w, number(k8[3]), score);
                score = fmaf(q1.x, number(k8[4]), score);
                score = fmaf(q1.y, number(k8[5]), score);
                score = fmaf(q1.z, number(k8[6]), score);
                score = fmaf(q1.w, number(k8[7]), score);
            }
        } else {
            for (u32 i = 0; i < key_dim; i++) score = fmaf(query[i], number(key[i]), score);
        }
        bool seen = position + lane >= start && position + lane < end;
        score = seen ? score * a.scale : -INFINITE;
        float largest = fmaxf(max, warp_max(score));
        float correction = expf(max - largest);
        float p = seen ? expf(score - largest) : 0;
        sum = sum * correction + warp_sum(p);
        max = largest;
#pragma unroll
        for (int i = 0; i < MOST_VALUES; i++) acc[i] *= correction;
        for (u32 j = 0; j < KEYS; j++) {
            float pj = __shfl_sync(ALL_LANES, p, j);
            // Memory beyond the last position is uninitialised.
            if (pj == 0) continue;
            const T* value = a.kv.latent ? (const T*)(keys + j * stride) + own : (a.staged ? values : v) + j * value_dim;
#pragma unroll
            for (int i = 0; i < MOST_VALUES; i++)
                if (32 * i < value_dim && 32 * i + lane < value_dim)
                    acc[i] = fmaf(pj, number(value[32 * i + lane]), acc[i]);
        }
    }
    if (!active) return;

    if (a.splits == 1) {
        if (a.sinks) {
            float largest = fmaxf(max, a.sinks[head]), correction = expf(max - largest);
            sum = sum * correction + expf(a.sinks[head] - largest);
#pragma unroll
            for (int i = 0; i < MOST_VALUES; i++) acc[i] *= correction;
        }
        float* out = a.out + ((u64)row * a.q_heads + head) * value_dim;
#pragma unroll
        for (int i = 0; i < MOST_VALUES; i++)
            if (32 * i + lane < value_dim) out[32 * i + lane] = acc[i] / sum;
    } else {
        float* out = a.partial + (((u64)split * a.rows + row) * a.q_heads + head) * (value_dim + 2);
#pragma unroll
        for (int i = 0; i < MOST_VALUES; i++)
            if (32 * i + lane < value_dim) out[32 * i + lane] = acc[i];
        if (lane == 0) out[value_dim] = max, out[value_dim + 1] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) attend_halves(const AttendArgs a) { attend<u16>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) attend_singles(const AttendArgs a) { attend<float>(a); }

#define MOST_SPLITS 64

// Combines the splits of the positions: one block per head of a row, one thread per channel.
extern "C" __global__ void merge(const AttendArgs a) {
    await_previous();
    __shared__ float factor[MOST_SPLITS];
    __shared__ float total;
    u32 head = blockIdx.x, row = blockIdx.y, dim = a.kv.value_dim;
    u64 step = (u64)a.rows * a.q_heads * (dim + 2);
    const float* from = a.partial + ((u64)row * a.q_heads + head) * (dim + 2);
    if (threadIdx.x < WARP) {
        u32 lane = threadIdx.x;
        float sink = a.sinks ? a.sinks[head] : -INFINITE;
        float m[2], s[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 split = lane + WARP * i;
            m[i] = split < a.splits ? from[split * step + dim] : -INFINITE;
            s[i] = split < a.splits ? from[split * step + dim + 1] : 0;
        }
        float max = fmaxf(sink, warp_max(fmaxf(m[0], m[1])));
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            factor[lane + WARP * i] = expf(m[i] - max);
            sum = fmaf(factor[lane + WARP * i], s[i], sum);
        }
        sum = warp_sum(sum);
        if (lane == 0) total = a.sinks ? sum + expf(sink - max) : sum;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < dim; i += blockDim.x) {
        float value = 0;
#pragma unroll 8
        for (u32 s = 0; s < a.splits; s++) value = fmaf(factor[s], from[s * step + i], value);
        a.out[((u64)row * a.q_heads + head) * dim + i] = value / total;
    }
}
