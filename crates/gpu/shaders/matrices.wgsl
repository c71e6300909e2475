
// Products of matrices with many rows of activations, by products of small matrices, which a subgroup of 32 threads
// computes together. Weights and activations are halves, sums are floats. Each workgroup computes 64 rows of a matrix with
// TOKENS rows of activations, 32 columns after 32; each subgroup 32 with 32.

struct Args {
    x_width: u32, // halves of a row of x, a multiple of 32
    cols: u32,
    tokens: u32,  // rows of x
//each {
    matrix$: u32,
    width$: u32, // floats between rows of the output
    end$: u32,   // the first workgroup after those of this product
//}
}
var<immediate> args: Args;

@group(0) @binding(#) var<storage, read> matrices: array<Matrix>;
@group(0) @binding(#) var<storage, read> x: array<vec4<f16>>;
//each {
@group(0) @binding(#) var<storage, read_write> out$: array<f32>;
//}
@group(0) @binding(#) var<storage, read> scales: array<f32>; // of the rows of x

const THREADS: u32 = 2u * TOKENS;

// Fours between rows: more than the eight that a row has, so that rows are in different banks.
const STRIDE: u32 = 10u;

var<workgroup> weights: array<vec4<f16>, 640>;
var<workgroup> activations: array<vec4<f16>, TOKENS * STRIDE>;

// 16 by 16 sums of each subgroup.
var<workgroup> results: array<f32, 8u * THREADS>;

//each {
// Unpacks 32 columns of a row.
fn load_weights$(thread: u32, first: u32, index: u32) {
    let m = matrices[args.matrix$];
    let g = unpack$(m, planes_of(m), min(first + thread, m.rows - 1u), index);
    for (var i = 0u; i < 8u; i++) {
        var lanes = g.scale[i / 4u] * g.lanes[i];
        if HAS_MIN$ { lanes = fma(vec4<f32>(g.scale[i / 4u]), g.lanes[i], vec4<f32>(g.min[i / 4u])); }
        weights[STRIDE * thread + i] = vec4<f16>(lanes);
    }
}
fn store$(row: u32, token: u32, value: f32) {
    let m = matrices[args.matrix$];
    if row < m.rows && token < args.tokens {
        out$[token * args.width$ + row] = value * scales[token] * m.factor;
    }
}
//}

fn load_activations(loader: u32, loaders: u32, first: u32, index: u32) {
    for (var i = loader; i < 8u * TOKENS; i += loaders) {
        let token = min(first + i / 8u, args.tokens - 1u);
        activations[STRIDE * (i / 8u) + i % 8u] = x[token * (args.x_width / 4u) + 8u * index + i % 8u];
    }
}

// Stores the sums of a part, of 16 tokens and 16 rows each, that every subgroup has put into `results`.
fn store_results(group: vec3<u32>, thread: u32, token_part: u32, row_part: u32) {
    workgroupBarrier();
    let team = thread / 32u;
    for (var i = thread % 32u; i < 256u; i += 32u) {
        let token = TOKENS * group.y + 32u * (team / 2u) + 16u * token_part + i / 16u;
        let row = 32u * (team % 2u) + 16u * row_part + i % 16u;
        let value = results[256u * team + i];
        var first = 0u;
//each {
        if group.x >= first && group.x < args.end$ { store$(64u * (group.x - first) + row, token, value); }
        first = args.end$;
//}
    }
    workgroupBarrier();
}

@compute @workgroup_size(THREADS)
fn matrices_by_matrices(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let team = thread / 32u;
    let token = STRIDE * 32u * (team / 2u);
    let row = STRIDE * 32u * (team % 2u);
    var sum_00 = coop_mat16x16<f32, C>();
    var sum_01 = coop_mat16x16<f32, C>();
    var sum_10 = coop_mat16x16<f32, C>();
    var sum_11 = coop_mat16x16<f32, C>();
    for (var index = 0u; 32u * index < args.cols; index++) {
        if thread < 64u {
            var first = 0u;
//each {
            if group.x >= first && group.x < args.end$ { load_weights$(thread, 64u * (group.x - first), index); }
            first = args.end$;
//}
        } else {
            load_activations(thread - 64u, THREADS - 64u, TOKENS * group.y, index);
        }
        workgroupBarrier();
        for (var k = 0u; k < 8u; k += 4u) {
            let a_0 = coopLoadT<coop_mat16x16<f16, A>>(&activations[token + k], STRIDE);
            let a_1 = coopLoadT<coop_mat16x16<f16, A>>(&activations[token + 16u * STRIDE + k], STRIDE);
            let b_0 = coopLoad<coop_mat16x16<f16, B>>(&weights[row + k], STRIDE);
            let b_1 = coopLoad<coop_mat16x16<f16, B>>(&weights[row + 16u * STRIDE + k], STRIDE);
            sum_00 = coopMultiplyAdd(a_0, b_0, sum_00);
            sum_01 = coopMultiplyAdd(a_0, b_1, sum_01);
            sum_10 = coopMultiplyAdd(a_1, b_0, sum_10);
            sum_11 = coopMultiplyAdd(a_1, b_1, sum_11);
        }
        workgroupBarrier();
    }
    coopStoreT(sum_00, &results[256u * team], 16u);
    store_results(group, thread, 0u, 0u);
    coopStoreT(sum_01, &results[256u * team], 16u);
    store_results(group, thread, 0u, 1u);
    coopStoreT(sum_10, &results[256u * team], 16u);
    store_results(group, thread, 1u, 0u);
    coopStoreT(sum_11, &results[256u * team], 16u);
    store_results(group, thread, 1u, 1u);
}
