// Products with weight matrices.
//
// Weights are read once for one row of activations, and multiplied in full precision, so memory is the limit. gemm.cu
// computes many rows, and few.cu a few.

#include "matrix.cuh"
#include "vector.cuh"

#define VECTOR_THREADS 256
#define VECTOR_WARPS (VECTOR_THREADS / WARP)
// Activations of a group in shared memory, with padding that spreads groups over the banks.
#define GROUP_STRIDE 36
// Columns whose activations are in shared memory at a time.
#define VECTOR_COLS 8192

struct DequantiseArgs {
    Mat w;
    const u32* rows; // the rows to read, or null for the first ones
    float* out;      // [count, cols]
    u32 count;
};

// out[i] = w[rows[i]]
extern "C" __global__ void dequantise(const DequantiseArgs a) {
    await_previous();
    u32 groups = (a.w.cols + 31) / 32;
    u32 i = blockIdx.y;
    Row r = row_of(a.w, slot_of(a.w, 0), a.rows ? a.rows[i] : i);
    for (u32 index = blockIdx.x * blockDim.x + threadIdx.x; index < groups; index += gridDim.x * blockDim.x) {
        Group g;
#define BODY(KIND) unpack_group<KIND>(a.w, r, index, g)
        WITH_KIND(a.w.kind, BODY)
#undef BODY
        u32 left = min(32, a.w.cols - 32 * index);
        float* out = a.out + (u64)i * a.w.cols + 32 * index;
#pragma unroll
        for (int lane = 0; lane < 32; lane++)
            if (lane < left) out[lane] = weight(g, lane);
    }
}

// The address of four activations in shared memory.
__device__ inline float4* four_in(float* shared, u32 i) { return (float4*)(shared + i / 8 * GROUP_STRIDE + i % 8 * 4); }

// Loads activations to shared memory; missing columns are zero. Each thread has TOGETHER loads of four in flight. One
// load after the other would take longer than the weights.
template <int TOGETHER> __device__ inline void stage(float* to, const float* x, u32 cols) {
    if (cols % 32 == 0 && (u64)x % 16 == 0) {
        u32 fours = cols / 4;
        for (u32 first = threadIdx.x; first < fours; first += TOGETHER * VECTOR_THREADS) {
            float4 v[TOGETHER];
#pragma unroll
            for (int j = 0; j < TOGETHER; j++) {
                u32 i = first + j * VECTOR_THREADS;
                if (i < fours) v[j] = ((const float4*)x)[i];
            }
#pragma unroll
            for (int j = 0; j < TOGETHER; j++) {
                u32 i = first + j * VECTOR_THREADS;
                if (i < fours) *four_in(to, i) = v[j];
            }
        }
        return;
    }
    u32 padded = (cols + 31) / 32 * 32;
    for (u32 i = threadIdx.x; i < padded; i += VECTOR_THREADS)
        to[i / 32 * GROUP_STRIDE + i % 32] = i < cols ? x[i] : 0;
}

// Adds the products of a group of some rows with the group's activations to sums.
template <u32 KIND, int ROWS>
__device__ inline void multiply(const Mat& m, const typename Unpack<KIND>::Raw (&raw)[ROWS], u32 index, const float* x,
                                float (&sum)[ROWS]) {
    Group g[ROWS];
    float part[ROWS][2] = {};
#pragma unroll
    for (int row = 0; row < ROWS; row++) Unpack<KIND>::unpack(m, raw[row], index, g[row]);
    float total[2] = {};
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float4 v = ((const float4*)x)[j];
        total[j / 4] += v.x + v.y + (v.z + v.w);
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            const float* lane = g[row].lane + 4 * j;
            float s = part[row][j / 4];
            s = fmaf(lane[0], v.x, fmaf(lane[1], v.y, s));
            part[row][j / 4] = fmaf(lane[2], v.z, fmaf(lane[3], v.w, s));
        }
    }
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        float s = sum[row];
#pragma unroll
        for (int i = 0; i < 2; i++) s = fmaf(g[row].scale[i], part[row][i], fmaf(-g[row].min[i], total[i], s));
        sum[row] = s;
    }
}

// Products of a warp's rows, ROWS per turn, with the columns [first, first + cols). The next weights are loaded while
// others are multiplied. `find` returns the rows of a turn. `prepare` loads the activations to shared memory and is
// called by the whole block. `x` returns a turn's activations, and `done` receives its sums.
template <u32 KIND, int ROWS, class Find, class Prepare, class X, class Done>
__device__ inline void pass(const Mat& m, u32 first, u32 cols, u32 turns, Find find, Prepare prepare, X x, Done done) {
    u32 groups = (cols + 31) / 32, steps = (groups + WARP - 1) / WARP, lane = threadIdx.x % WARP;
    u32 next_turn = 0, next_step = 0;
    Row rows[ROWS];
    find(0, rows);
    typename Unpack<KIND>::Raw raw[ROWS];
    auto load = [&]() {
        u32 index = first / 32 + min(next_step * WARP + lane, groups - 1);
#pragma unroll
        for (int row = 0; row < ROWS; row++) raw[row] = Unpack<KIND>::load(m, rows[row], index);
        if (++next_step < steps) return;
        next_step = 0;
        if (++next_turn < turns) find(next_turn, rows);
    };
    load();
    prepare();
    for (u32 turn = 0; turn < turns; turn++) {
        float sum[ROWS] = {};
        const float* from = x(turn);
        for (u32 step = 0; step < steps; step++) {
            typename Unpack<KIND>::Raw now[ROWS];
#pragma unroll
            for (int row = 0; row < ROWS; row++) now[row] = raw[row];
            if (next_turn < turns) load();
            u32 i = step * WARP + lane;
            if (i < groups) multiply<KIND, ROWS>(m, now, first / 32 + i, from + GROUP_STRIDE * i, sum);
        }
#pragma unroll
        for (int row = 0; row < ROWS; row++) sum[row] = warp_sum(sum[row]);
        done(turn, sum);
    }
}

// Loads of four activations and their summands in flight per thread.
#define SUMMANDS 2

// Loads the norm's weights to shared memory before the activations are ready.
__device__ inline void stage_norm(float* to, const PriorNorm& norm, u32 cols) {
    if (norm.w) stage<SUMMANDS>(to, norm.w, cols);
}

// Loads one row of activations to shared memory, normed except for a factor, which is returned. The first block stores
// the norm's input and output.
__device__ inline float stage_normed(float* to, const float* x, const PriorNorm& norm, u32 cols) {
    float squares = 0;
    bool keep = blockIdx.x == 0, adds = norm.added;
    u32 fours = cols / 4;
    for (u32 first = threadIdx.x; first < fours; first += SUMMANDS * VECTOR_THREADS) {
        float4 v[SUMMANDS], y[SUMMANDS];
#pragma unroll
        for (int j = 0; j < SUMMANDS; j++) {
            u32 i = first + j * VECTOR_THREADS;
            y[j] = float4{0, 0, 0, 0};
            if (i < fours) v[j] = ((const float4*)x)[i];
            if (i < fours && adds) y[j] = ((const float4*)norm.added)[i];
        }
#pragma unroll
        for (int j = 0; j < SUMMANDS; j++) {
            u32 i = first + j * VECTOR_THREADS;
            if (i >= fours) break;
            v[j].x += y[j].x, v[j].y += y[j].y, v[j].z += y[j].z, v[j].w += y[j].w;
            if (adds && keep) ((float4*)norm.sum)[i] = v[j];
            squares += v[j].x * v[j].x + v[j].y * v[j].y + v[j].z * v[j].z + v[j].w * v[j].w;
            // Each thread reads what it wrote.
            float4 w = *four_in(to, i);
            *four_in(to, i) = float4{v[j].x * w.x, v[j].y * w.y, v[j].z * w.z, v[j].w * w.w};
        }
    }
    float factor = 1 / sqrtf(block_sum(squares) / cols + norm.eps);
    if (keep) {
        for (u32 i = threadIdx.x; i < fours; i += VECTOR_THREADS) {
            float4 v = *four_in(to, i);
            ((float4*)norm.normed)[i] = float4{v.x * factor, v.y * factor, v.z * factor, v.w * factor};
        }
    }
    return factor;
}

// out[y][r] = w[r] . x[y / share]
extern "C" __global__ void __launch_bounds__(VECTOR_THREADS, 3) matvec(const MatvecArgs a) {
    extern __shared__ float shared[];
    u32 which = 0, start = 0;
    while (blockIdx.x >= a.blocks[which]) start = a.blocks[which++];
    const Mat& m = a.w[which];
    u32 y = blockIdx.y;
    // Loads weights before the activations are ready, unless the expert is not known before.
    if (a.experts) await_previous();
    u32 expert = a.experts ? a.experts[y] : 0;
    u64 slot = slot_of(m, expert);
    if (absent(m, slot)) return;
    u32 first_row = ((blockIdx.x - start) * VECTOR_WARPS + threadIdx.x / WARP) * a.turns;
    const float* x = a.x + (u64)(y / a.share) * a.x_width;
    float factor = 1;
    auto write = [&](u32 row, float sum) {
        if (threadIdx.x % WARP || row >= m.rows) return;
        float bias = a.bias[which] ? a.bias[which][(u64)expert * m.rows + row] : 0;
        a.out[which][(u64)y * a.width[which] + row] = sum * factor + bias;
    };
    // Rows beyond the last repeat it.
    auto row_at = [&](u32 row) { return row_of(m, slot, min(row, m.rows - 1)); };
    auto from_start = [&](u32) { return (const float*)shared; };
    if (m.cols <= VECTOR_COLS) {
        auto find = [&](u32 turn, Row(&rows)[1]) { rows[0] = row_at(first_row + turn); };
        auto prepare = [&]() {
            if (a.ahead && threadIdx.x == 0) fetch_rows(m, slot, first_row, VECTOR_WARPS * a.turns);
            stage_norm(shared, a.norm, m.cols);
            if (!a.experts) await_previous();
            if (a.norm.w) factor = stage_normed(shared, x, a.norm, m.cols);
            else stage<4>(shared, x, m.cols);
            __syncthreads();
        };
        auto done = [&](u32 turn, const float(&sum)[1]) { write(first_row + turn, sum[0]); };
#define BODY(KIND) pass<KIND, 1>(m, 0, m.cols, a.turns, find, prepare, from_start, done)
        WITH_KIND(m.kind, BODY)
#undef BODY
        return;
    }
    if (!a.experts) await_previous();
    for (u32 turn = 0; turn < a.turns; turn++) {
        float total = 0;
        for (u32 first = 0; first < m.cols; first += VECTOR_COLS) {
            u32 cols = min(VECTOR_COLS, m.cols - first);
            auto find = [&](u32, Row(&rows)[1]) { rows[0] = row_at(first_row + turn); };
            auto prepare = [&]() {
                __syncthreads();
                stage<4>(shared, x + first, cols);
                __syncthreads();
            };
            auto done = [&](u32, const float(&sum)[1]) { total += sum[0]; };
#define BODY(KIND) pass<KIND, 1>(m, first, cols, 1, find, prepare, from_start, done)
            WITH_KIND(m.kind, BODY)
#undef BODY
        }
        write(first_row + turn, total);
    }
}

struct HeadsArgs {
    Mat w; // all heads' rows one after another
    const float* x;
    float* out;
    u32 heads, first, rows;   // the heads' matrices: `rows` rows of each head's stored rows, from `first` on
    u32 transposed;           // whether these rows are the columns of the matrix
    u32 x_width, out_width;   // of one token
    u32 tokens;
};

// out[h] = [rest | W[h] part] with x[h] = [part | rest]; one warp per number.
extern "C" __global__ void head_products(const HeadsArgs a) {
    await_previous();
    u32 head_dim = a.x_width / a.heads, out_dim = a.out_width / a.heads;
    u32 cols = a.transposed ? a.rows : a.w.cols;
    u32 rest = head_dim - cols;
    u32 lane = threadIdx.x % WARP;
    u32 i = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    u32 head = blockIdx.y, token = blockIdx.z;
    if (i >= out_dim) return;
    const float* x = a.x + (u64)token * a.x_width + head * head_dim;
    float* out = a.out + (u64)token * a.out_width + head * out_dim;
    if (i < rest) {
        if (lane == 0) out[i] = x[cols + i];
        return;
    }
    u32 first = head * (a.w.rows / a.heads) + a.first;
    float sum = 0;
    if (a.transposed) {
        u32 col = i - rest;
        for (u32 r = lane; r < cols; r += WARP) {
            Group g;
            Row row = row_of(a.w, 0, first + r);
            float w = 0;
#define BODY(KIND) unpack_group<KIND>(a.w, row, col / 32, g)
            WITH_KIND(a.w.kind, BODY)
#undef BODY
#pragma unroll
            for (int j = 0; j < 32; j++)
                if (j == col % 32) w = weight(g, j);
            sum = fmaf(w, x[r], sum);
        }
    } else {
        Row row = row_of(a.w, 0, first + i - rest);
        for (u32 index = lane; index < (cols + 31) / 32; index += WARP) {
            Group g;
#define BODY(KIND) unpack_group<KIND>(a.w, row, index, g)
            WITH_KIND(a.w.kind, BODY)
#undef BODY
#pragma unroll
            for (int j = 0; j < 32; j++)
                if (32 * index + j < cols) sum = fmaf(weight(g, j), x[32 * index + j], sum);
        }
    }
    sum = warp_sum(sum);
    if (lane == 0) out[i] = sum;
}

// out[y][r] = activation(gate[r] . x, up[r] . x), for two matrices of the same kind with at most VECTOR_COLS columns.
extern "C" __global__ void __launch_bounds__(VECTOR_THREADS, 2) gate_up(const GateUpArgs a) {
    await_previous();
    extern __shared__ float shared[];
    u32 y = blockIdx.y;
    u32 expert = a.experts ? a.experts[y] : 0;
    // An expert's matrices are all in its slot.
    u64 slot = slot_of(a.gate, expert);
    if (absent(a.gate, slot)) return;
    u32 first_row = (blockIdx.x * VECTOR_WARPS + threadIdx.x / WARP) * a.turns;
    const Mat& m = a.gate;
    auto find = [&](u32 turn, Row(&rows)[2]) {
        u32 row = min(first_row + turn, m.rows - 1);
        rows[0] = row_of(m, slot, row);
        rows[1] = row_of(a.up, slot, row);
    };
    auto prepare = [&]() {
        if (a.ahead && threadIdx.x == 0) {
            fetch_rows(m, slot, first_row, VECTOR_WARPS * a.turns);
            fetch_rows(a.up, slot, first_row, VECTOR_WARPS * a.turns);
            // The next kernel cannot begin before this one ends, and memory would be idle meanwhile.
            u32 share = (a.next.rows + gridDim.x - 1) / gridDim.x;
            fetch_rows(a.next, slot, blockIdx.x * share, share);
        }
        stage<4>(shared, a.x + (u64)(y / a.share) * a.x_width, m.cols);
        __syncthreads();
    };
    auto from_start = [&](u32) { return (const float*)shared; };
    auto done = [&](u32 turn, const float(&sum)[2]) {
        u32 row = first_row + turn;
        if (threadIdx.x % WARP || row >= m.rows) return;
        u64 at = (u64)expert * m.rows + row;
        float gate = sum[0] + (a.gate_bias ? a.gate_bias[at] : 0), up = sum[1] + (a.up_bias ? a.up_bias[at] : 0);
        a.out[(u64)y * m.rows + row] = activate(gate, up, a.activation);
    };
#define BODY(KIND) pass<KIND, 2>(m, 0, m.cols, a.turns, find, prepare, from_start, done)
    WITH_KIND(m.kind, BODY)
#undef BODY
}

#define MOST_CHOSEN 64
// Rows of each expert per block, computed two at a time.
#define DOWN_ROWS 8

struct DownArgs {
    Mat w;
    const float* bias;    // [experts, hidden], or null
    const float* x;       // [rows, top_k, inner]
    const u32* experts;   // [rows, top_k]
    const float* weights; // [rows, top_k]
    float* out;           // [rows, hidden]
    u32 top_k;
};

// out[t] = the sum of weight * (w of the expert . x), in rank order. The experts are divided among the warps. All
// activations of a row fit in shared memory and are whole groups.
extern "C" __global__ void __launch_bounds__(VECTOR_THREADS, 2) down_combine(const DownArgs a) {
    extern __shared__ float shared[];
    __shared__ float products[MOST_CHOSEN][DOWN_ROWS];
    const Mat& m = a.w;
    u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    u32 first_row = blockIdx.x * DOWN_ROWS;
    u64 row = blockIdx.y;
    // The kernel before this one used the choice, so it waited for the kernel that made it.
    const volatile u32* experts = a.experts + row * a.top_k;
    u32 mine = warp < a.top_k ? (a.top_k - warp + VECTOR_WARPS - 1) / VECTOR_WARPS : 0;
    // The work of a warp's turn: two rows of one expert.
    auto rank = [&](u32 turn) { return warp + turn / (DOWN_ROWS / 2) * VECTOR_WARPS; };
    auto row_at = [&](u32 turn) { return first_row + turn % (DOWN_ROWS / 2) * 2; };
    u64 slot;
    auto find = [&](u32 turn, Row(&rows)[2]) {
        // Read once, because waiting for it delays the loads of weights. A warp without an expert loads data that it
        // does not use.
        if (turn % (DOWN_ROWS / 2) == 0) slot = slot_of(m, experts[min(rank(turn), a.top_k - 1)]);
        u32 r = row_at(turn);
        rows[0] = row_of(m, slot, min(r, m.rows - 1));
        rows[1] = row_of(m, slot, min(r + 1, m.rows - 1));
    };
    auto prepare = [&]() {
        await_previous();
        stage<8>(shared, a.x + row * a.top_k * m.cols, a.top_k * m.cols);
        __syncthreads();
    };
    auto x = [&](u32 turn) { return (const float*)shared + rank(turn) * (m.cols / 32) * GROUP_STRIDE; };
    auto done = [&](u32 turn, const float(&sum)[2]) {
        u32 at = turn % (DOWN_ROWS / 2) * 2;
        if (lane < 2) products[rank(turn)][at + lane] = lane ? sum[1] : sum[0];
    };
#define BODY(KIND) pass<KIND, 2>(m, 0, m.cols, mine * (DOWN_ROWS / 2), find, prepare, x, done)
    WITH_KIND(m.kind, BODY)
#undef BODY
    __syncthreads();
    u32 r = first_row + threadIdx.x;
    if (threadIdx.x >= DOWN_ROWS || r >= m.rows) return;
    float total = 0;
    for (u32 k = 0; k < a.top_k; k++) {
        float bias = a.bias ? a.bias[(u64)experts[k] * m.rows + r] : 0;
        total = fmaf(a.weights[row * a.top_k + k], products[k][threadIdx.x] + bias, total);
    }
    a.out[row * m.rows + r] = total;
}
