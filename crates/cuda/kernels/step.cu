// Attention of a decode step: one row of each sequence, from the products' output to attention's output.
//
// A block has up to HEADS query heads of one key head of a row, and one split of the positions. It loads keys and
// values of earlier positions before the row's own are ready, because no kernel that may still run writes them. The
// tensor cores compute the products. Queries and the weights of values are split into two f16 each, a rounded number
// and its remainder, which is as precise as f32. So each head has two of the 16 rows that are multiplied at once.

#include "matrix.cuh"
#include "tensor.cuh"
#include "pages.cuh"

#define THREADS 256
#define WARPS (THREADS / WARP)
// Query heads per block; one warp each where heads are processed separately.
#define HEADS 8
// Keys in shared memory at a time: two pages.
#define CHUNK (2 * PAGE)
// The most channels of a head.
#define MOST_DIM 256
// Padding of rows in shared memory, in f16, so that eight rows are in different banks.
#define PADDING 8

struct StepArgs {
    KvArgs kv;
    const float* q;      // [rows, q_heads * key_dim]
    const float* k;      // [rows, heads * key_dim]
    const float* v;      // [rows, heads * value_dim]
    const float* q_norm; // or null
    const float* k_norm;
    const float* angles; // [rows, cos... | sin...]
    const float* sinks;  // [q_heads], or null
    float* out;          // [rows, q_heads * value_dim]
    float* partial;      // [splits, rows, q_heads, value_dim + 2], if there are several: out, max, sum
    u32* arrived;        // [rows, blocks of heads] counters
    u32 q_heads, rows, splits;
    u32 half, interleaved;
    float scale, eps;
};

// The number of channels of keys and values. If DIM is not 0, it is DIM, which makes the code shorter. If DIM is 0, it
// is any multiple of 16.
template <u32 DIM> struct Dims {
    // The most channels, and the most per lane.
    static const int MOST = DIM ? DIM : MOST_DIM;
    static const int PARTS = (MOST + WARP - 1) / WARP;
    // The most groups of 16 channels per warp.
    static const int SIXTEENS = (MOST / 16 + WARPS - 1) / WARPS;
    static __device__ inline u32 key(const StepArgs& a) { return DIM ? DIM : a.kv.key_dim; }
    static __device__ inline u32 value(const StepArgs& a) { return DIM ? DIM : a.kv.value_dim; }
};

// A block's shared memory.
struct Place {
    u16* keys;    // [CHUNK, key_dim]
    u16* values;  // [CHUNK, value_dim]
    u16* queries; // [2, HEADS, key_dim]
    u16* weights; // [2, HEADS, CHUNK]
    u16* newest;  // the row's own key and value
    float* scores; // [HEADS, CHUNK]
    float* made;   // [WARPS, key_dim] heads in progress
    float* factor; // [2, HEADS] for the sum so far, and for the final sum
    u32 key_stride, value_stride, weight_stride, score_stride;
};

__device__ inline Place place_in(u8* shared, u32 key_dim, u32 value_dim) {
    Place p;
    p.key_stride = key_dim + PADDING, p.value_stride = value_dim + PADDING;
    p.weight_stride = CHUNK + PADDING, p.score_stride = CHUNK + PADDING / 2;
    p.keys = (u16*)shared;
    p.values = p.keys + CHUNK * p.key_stride;
    p.queries = p.values + CHUNK * p.value_stride;
    p.weights = p.queries + 2 * HEADS * p.key_stride;
    p.newest = p.weights + 2 * HEADS * p.weight_stride;
    p.scores = (float*)(p.newest + key_dim + value_dim);
    p.made = p.scores + HEADS * p.score_stride;
    p.factor = p.made + WARPS * key_dim;
    return p;
}

// Channels of a head, divided among the lanes of a warp.
template <int PARTS> struct Head {
    float channel[PARTS];
};

template <int PARTS> __device__ inline Head<PARTS> load_head(const float* from, u32 dim) {
    Head<PARTS> h;
#pragma unroll
    for (int j = 0; j < PARTS; j++) {
        u32 i = threadIdx.x % WARP + WARP * j;
        h.channel[j] = from && i < dim ? from[i] : 1;
    }
    return h;
}

// A row's cosines and sines, divided among the lanes.
template <int PARTS> struct Angles {
    float cosine[PARTS], sine[PARTS];
};

template <int PARTS> __device__ inline Angles<PARTS> load_angles(const float* from, u32 half) {
    Angles<PARTS> a;
#pragma unroll
    for (int j = 0; j < PARTS; j++) {
        u32 i = threadIdx.x % WARP + WARP * j;
        a.cosine[j] = i < half ? from[i] : 0;
        a.sine[j] = i < half ? from[half + i] : 0;
    }
    return a;
}

// Norms and rotates a head with one warp.
template <int PARTS>
__device__ inline void make_head(float* to, const Head<PARTS>& head, const Head<PARTS>& norm,
                                 const Angles<PARTS / 2>& angles, const StepArgs& a, u32 dim, bool normed) {
    u32 lane = threadIdx.x % WARP;
    float squares = 0, scale = 1;
#pragma unroll
    for (int j = 0; j < PARTS; j++)
        if (lane + WARP * j < dim) squares = fmaf(head.channel[j], head.channel[j], squares);
    if (normed) scale = 1 / sqrtf(warp_sum(squares) / dim + a.eps);
#pragma unroll
    for (int j = 0; j < PARTS; j++)
        if (lane + WARP * j < dim) to[lane + WARP * j] = head.channel[j] * scale * norm.channel[j];
    __syncwarp();
#pragma unroll
    for (int j = 0; j < PARTS / 2; j++) {
        u32 i = lane + WARP * j;
        if (i >= a.half) continue;
        u32 first = a.interleaved ? 2 * i : i, second = a.interleaved ? 2 * i + 1 : i + a.half;
        float x = to[first], y = to[second];
        to[first] = x * angles.cosine[j] - y * angles.sine[j];
        to[second] = y * angles.cosine[j] + x * angles.sine[j];
    }
    __syncwarp();
}

// Positions whose keys are in shared memory.
struct Chunk {
    u32 first, start, end; // a query sees [start, end)

    __device__ inline u32 count() const { return min(CHUNK, end - first); }
    __device__ inline bool seen(u32 key) const { return first + key >= start && first + key < end; }
    // Whether the chunk includes the row's own position, which is the last.
    __device__ inline bool has_newest() const { return end - first <= CHUNK; }
};

// Starts to load the keys and values of earlier positions to shared memory. Each warp loads those of one position at a
// time.
template <u32 DIM>
__device__ inline void load_chunk(const Place& p, const StepArgs& a, u8* const* pages, u32 kv_head, Chunk chunk) {
    u32 key_dim = Dims<DIM>::key(a), value_dim = Dims<DIM>::value(a);
    u32 key_eights = key_dim / 8, eights = key_eights + value_dim / 8;
    const u16* page[2] = {(const u16*)pages[chunk.first / PAGE], 0};
    if (chunk.first + PAGE < chunk.end) page[1] = (const u16*)pages[chunk.first / PAGE + 1];
#pragma unroll 1
    for (u32 i = threadIdx.x % WARP; i < eights; i += WARP) {
        bool is_key = i < key_eights;
        u32 channel = 8 * (is_key ? i : i - key_eights), dim = is_key ? key_dim : value_dim;
        u32 from = (is_key ? 0 : a.kv.heads * PAGE * key_dim) + kv_head * PAGE * dim + channel;
        u16* to = (is_key ? p.keys : p.values) + channel;
        u32 stride = is_key ? p.key_stride : p.value_stride;
#pragma unroll 4
        for (u32 key = threadIdx.x / WARP; key < CHUNK; key += WARPS) {
            if (chunk.seen(key) && chunk.first + key + 1 < chunk.end)
                copy_sixteen(to + key * stride, (key < PAGE ? page[0] : page[1]) + from + key % PAGE * dim);
            // Invisible positions have weight zero, but zero times uninitialised memory may be NaN.
            else *(uint4*)(to + key * stride) = uint4{0, 0, 0, 0};
        }
    }
}

// A number as two f16; the second is the remainder of the first.
__device__ inline void store_twice(u16* to, u32 apart, float x) {
    *to = float_to_half(x);
    to[apart] = float_to_half(x - half_to_float(*to));
}

// Products of the queries with a chunk's keys; one warp for every 16 keys.
__device__ inline void score_chunk(const Place& p, u32 key_dim, Chunk chunk) {
    u32 lane = threadIdx.x % WARP;
    for (u32 first = threadIdx.x / WARP * 16; first < chunk.count(); first += 16 * WARPS) {
        // Even and odd steps are summed separately, because each product waits for its predecessor.
        float d[2][2][4] = {};
        const u16* query = p.queries + lane % 16 * p.key_stride + lane / 16 * 8;
        const u16* key = p.keys + (first + lane % 8 + lane / 16 * 8) * p.key_stride + lane / 8 % 2 * 8;
#pragma unroll 8
        for (u32 channel = 0; channel < key_dim; channel += 32) {
#pragma unroll
            for (int which = 0; which < 2; which++) {
                if (channel + 16 * which >= key_dim) break;
                u32 q[4], k[4];
                load_four(q, query + channel + 16 * which);
                load_four(k, key + channel + 16 * which);
                multiply_add(d[which][0], q, k);
                multiply_add(d[which][1], q, k + 2);
            }
        }
#pragma unroll
        for (int eight = 0; eight < 2; eight++) {
            float* to = p.scores + lane / 4 * p.score_stride + first + 8 * eight + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < 2; i++)
                to[i] = d[0][eight][i] + d[1][eight][i] + (d[0][eight][i + 2] + d[1][eight][i + 2]);
        }
    }
}

// What a head has accumulated so far.
struct Seen {
    float max, sum;
};

// Converts the scores of a head to weights with one warp.
__device__ inline void weigh_chunk(const Place& p, u32 head, Chunk chunk, Seen& seen) {
    u32 lane = threadIdx.x % WARP;
    float score[CHUNK / WARP], largest = seen.max, sum = 0;
#pragma unroll
    for (int j = 0; j < CHUNK / WARP; j++) {
        u32 key = lane + WARP * j;
        score[j] = chunk.seen(key) ? p.scores[head * p.score_stride + key] : -INFINITE;
        largest = fmaxf(largest, score[j]);
    }
    largest = warp_max(largest);
#pragma unroll
    for (int j = 0; j < CHUNK / WARP; j++) {
        // If scores are NaN or infinite, so are their weights.
        float weight = chunk.seen(lane + WARP * j) ? expf(score[j] - largest) : 0;
        sum += weight;
        store_twice(p.weights + head * p.weight_stride + lane + WARP * j, HEADS * p.weight_stride, weight);
    }
    float correction = expf(seen.max - largest);
    seen.sum = seen.sum * correction + warp_sum(sum);
    seen.max = largest;
    if (lane == 0) p.factor[head] = correction;
}

// Adds the weighted values of a chunk. Each warp has some channels of all heads.
template <int SIXTEENS>
__device__ inline void add_chunk(const Place& p, u32 value_dim, Chunk chunk, float (&out)[SIXTEENS][2][4]) {
    u32 lane = threadIdx.x % WARP, first = threadIdx.x / WARP * 16;
    float correction = p.factor[lane / 4];
    const u16* weight = p.weights + lane % 16 * p.weight_stride + lane / 16 * 8;
    const u16* value = p.values + lane % 16 * p.value_stride + lane / 16 * 8;
#pragma unroll
    for (int s = 0; s < SIXTEENS; s++) {
        u32 channel = first + s * 16 * WARPS;
        if (channel >= value_dim) break;
#pragma unroll
        for (int i = 0; i < 8; i++) out[s][i / 4][i % 4] *= correction;
#pragma unroll 4
        for (u32 key = 0; key < chunk.count(); key += 16) {
            u32 w[4], v[4];
            load_four(w, weight + key);
            load_four_transposed(v, value + key * p.value_stride + channel);
            multiply_add(out[s][0], w, v);
            multiply_add(out[s][1], w, v + 2);
        }
    }
}

// Combines the splits of a head with one warp.
template <int PARTS> __device__ inline void merge_head(const StepArgs& a, u32 dim, u32 row, u32 head) {
    u32 lane = threadIdx.x % WARP;
    u64 step = (u64)a.rows * a.q_heads * (dim + 2);
    const float* from = a.partial + ((u64)row * a.q_heads + head) * (dim + 2);
    float sink = a.sinks ? a.sinks[head] : -INFINITE;
    float max[2], sum[2], factor[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 split = lane + WARP * i;
        max[i] = split < a.splits ? from[split * step + dim] : -INFINITE;
        sum[i] = split < a.splits ? from[split * step + dim + 1] : 0;
    }
    float largest = fmaxf(sink, warp_max(fmaxf(max[0], max[1])));
#pragma unroll
    for (int i = 0; i < 2; i++) factor[i] = expf(max[i] - largest);
    float total = warp_sum(fmaf(factor[0], sum[0], factor[1] * sum[1]));
    if (a.sinks) total += expf(sink - largest);
    float value[PARTS] = {};
#pragma unroll 4
    for (u32 split = 0; split < a.splits; split++) {
        float f = __shfl_sync(ALL_LANES, split < WARP ? factor[0] : factor[1], split % WARP);
#pragma unroll
        for (int j = 0; j < PARTS; j++)
            if (lane + WARP * j < dim) value[j] = fmaf(f, from[split * step + lane + WARP * j], value[j]);
    }
    float* out = a.out + ((u64)row * a.q_heads + head) * dim;
#pragma unroll
    for (int j = 0; j < PARTS; j++)
        if (lane + WARP * j < dim) out[lane + WARP * j] = value[j] / total;
}

template <u32 DIM> __device__ inline void attend(const StepArgs& a) {
    typedef Dims<DIM> D;
    extern __shared__ __align__(16) u8 shared[];
    u32 key_dim = D::key(a), value_dim = D::value(a);
    u32 group = a.q_heads / a.kv.heads, blocks = (group + HEADS - 1) / HEADS;
    u32 kv_head = blockIdx.x / blocks, in_group = blockIdx.x % blocks * HEADS;
    u32 first_head = kv_head * group + in_group, heads = min(HEADS, group - in_group);
    u32 row = blockIdx.y, split = blockIdx.z, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    Place p = place_in(shared, key_dim, value_dim);

    // A split consists of whole chunks.
    u32 end = a.kv.position[row] + 1, start = a.kv.start(end);
    u8* const* pages = a.kv.pages + (u64)a.kv.sequence[row] * a.kv.capacity;
    u32 first_chunk = start / CHUNK, chunks = (end + CHUNK - 1) / CHUNK - first_chunk;
    u32 share = (chunks + a.splits - 1) / a.splits;
    u32 from = first_chunk + min(split * share, chunks), to = first_chunk + min((split + 1) * share, chunks);
    auto chunk_at = [&](u32 i) { return Chunk{i * CHUNK, start, end}; };
    bool has_newest = from < to && chunk_at(to - 1).has_newest();
    if (from < to) load_chunk<DIM>(p, a, pages, kv_head, chunk_at(from));
    u16* newest_page = has_newest ? (u16*)pages[(end - 1) / PAGE] : 0;
    auto q_norm = load_head<D::PARTS>(a.q_norm, key_dim), k_norm = load_head<D::PARTS>(a.k_norm, key_dim);

    await_previous();
    // The first warp makes a query and the key, and loads both before it makes either.
    bool makes_key = warp == 0 && has_newest;
    u64 kv_row = (u64)row * a.kv.heads + kv_head;
    auto angles = load_angles<D::PARTS / 2>(a.angles + (u64)row * 2 * a.half, a.half);
    const float* my_query = warp < heads ? a.q + ((u64)row * a.q_heads + first_head + warp) * key_dim : 0;
    auto q = load_head<D::PARTS>(my_query, key_dim);
    auto k = load_head<D::PARTS>(makes_key ? a.k + kv_row * key_dim : 0, key_dim);
    if (has_newest && threadIdx.x < value_dim)
        p.newest[key_dim + threadIdx.x] = float_to_half(a.v[kv_row * value_dim + threadIdx.x]);
    float* made = p.made + warp * key_dim;
    if (warp < heads) {
        make_head(made, q, q_norm, angles, a, key_dim, a.q_norm);
        for (u32 i = lane; i < key_dim; i += WARP)
            store_twice(p.queries + warp * p.key_stride + i, HEADS * p.key_stride, made[i] * a.scale);
        __syncwarp();
    }
    if (makes_key) {
        make_head(made, k, k_norm, angles, a, key_dim, a.k_norm);
        for (u32 i = lane; i < key_dim; i += WARP) p.newest[i] = float_to_half(made[i]);
    }

    Seen seen = {-INFINITE, 0};
    float out[D::SIXTEENS][2][4] = {};
    for (u32 i = from; i < to; i++) {
        Chunk chunk = chunk_at(i);
        if (i > from) {
            __syncthreads();
            load_chunk<DIM>(p, a, pages, kv_head, chunk);
        }
        await_copies();
        __syncthreads();
        if (chunk.has_newest()) {
            u32 key = end - 1 - chunk.first;
            u64 at = kv_head * PAGE + (end - 1) % PAGE;
            for (u32 i = threadIdx.x; i < key_dim + value_dim; i += THREADS) {
                bool is_key = i < key_dim;
                u32 channel = is_key ? i : i - key_dim;
                *(is_key ? p.keys + key * p.key_stride + i : p.values + key * p.value_stride + channel) = p.newest[i];
                // One of the blocks that made the key stores it.
                if (in_group == 0)
                    newest_page[is_key ? at * key_dim + i
                                       : (u64)a.kv.heads * PAGE * key_dim + at * value_dim + channel] = p.newest[i];
            }
            __syncthreads();
        }
        score_chunk(p, key_dim, chunk);
        __syncthreads();
        if (warp < heads) weigh_chunk(p, warp, chunk, seen);
        __syncthreads();
        add_chunk(p, value_dim, chunk, out);
    }

    if (a.splits == 1) {
        // The factor for every head's sum.
        if (warp < heads && lane == 0) {
            float sink = a.sinks ? a.sinks[first_head + warp] : -INFINITE, largest = fmaxf(seen.max, sink);
            float correction = expf(seen.max - largest);
            p.factor[HEADS + warp] = correction / (seen.sum * correction + (a.sinks ? expf(sink - largest) : 0));
        }
        __syncthreads();
    }
    u32 width = a.splits == 1 ? value_dim : value_dim + 2, head = lane / 4;
    float* result = a.splits == 1 ? a.out : a.partial + (u64)split * a.rows * a.q_heads * width;
    result += ((u64)row * a.q_heads + first_head) * width;
    float factor = a.splits == 1 ? p.factor[HEADS + head] : 1;
    if (head < heads) {
#pragma unroll
        for (int i = 0; i < D::SIXTEENS * 4; i++) {
            u32 channel = i / 4 * 16 * WARPS + warp * 16 + i / 2 % 2 * 8 + lane % 4 * 2 + i % 2;
            const float(&sums)[4] = out[i / 4][i / 2 % 2];
            if (channel < value_dim) result[head * width + channel] = (sums[i % 2] + sums[i % 2 + 2]) * factor;
        }
    }
    if (a.splits == 1) return;
    if (warp < heads && lane == 0) {
        result[warp * width + value_dim] = seen.max;
        result[warp * width + value_dim + 1] = seen.sum;
    }
    if (last_of(a.arrived + (u64)row * gridDim.x + blockIdx.x, a.splits) && warp < heads)
        merge_head<D::PARTS>(a, value_dim, row, first_head + warp);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) attend_step(const StepArgs a) { attend<0>(a); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) attend_step_128(const StepArgs a) { attend<128>(a); }
