
// The same by products of small matrices, which a subgroup of 32 threads computes together. Weights and activations are
// halves, sums are floats. Each workgroup computes 128 rows, which the matrices share, for a tile of up to TOKENS places,
// 32 columns after 32; each subgroup 64 with 32 of them.

@group(0) @binding(#) var<storage, read> x: array<vec4<f16>>;
@group(0) @binding(#) var<storage, read> scales: array<f32>; // of the rows of x

const THREADS: u32 = 2u * TOKENS;

// Rows of each matrix.
const EACH: u32 = 128u / SLOTS;

// Fours between rows: more than the eight that a row has, so that rows are in different banks.
const STRIDE: u32 = 10u;

// The places of the tile, or none if its expert is not bound. Small matrices need control flow that is seen to be uniform.
var<workgroup> count: u32;

// The row of x for each place.
var<workgroup> sources: array<u32, TOKENS>;
var<workgroup> lines: array<vec4<f16>, 128u * STRIDE>;
var<workgroup> activations: array<vec4<f16>, TOKENS * STRIDE>;

// Twice 16 by 16 sums of each subgroup: of rows in the first half of the 128, and 64 rows further.
var<workgroup> results: array<f32, 16u * THREADS>;

//each {
// Unpacks 32 columns of a row.
fn load_weights$(line: u32, row: u32, index: u32) {
    let m = matrices[args.matrix$];
    let g = unpack$(m, planes_in(m, args.ranges$), min(row, m.rows - 1u), index);
    for (var i = 0u; i < 8u; i++) {
        var lanes = g.scale[i / 4u] * g.lanes[i];
        if HAS_MIN$ { lanes = fma(vec4<f32>(g.scale[i / 4u]), g.lanes[i], vec4<f32>(g.min[i / 4u])); }
        lines[STRIDE * line + i] = vec4<f16>(lanes);
    }
}
//}

fn load_all(group: vec3<u32>, thread: u32, index: u32) {
    for (var line = thread; line < 128u; line += THREADS) {
//each {
        if line / EACH == $u { load_weights$(line, EACH * group.x + line % EACH, index); }
//}
    }
    for (var i = thread; i < 8u * TOKENS; i += THREADS) {
        activations[STRIDE * (i / 8u) + i % 8u] = x[sources[i / 8u] * (args.x_width / 4u) + 8u * index + i % 8u];
    }
}

// Finishes a part, of 16 places and twice 16 rows, that every subgroup has put into `results`.
fn finish_part(job: Job, group: vec3<u32>, thread: u32, place_part: u32, row_part: u32) {
    workgroupBarrier();
    let team = thread / 32u;
    for (var i = thread % 32u; i < 256u; i += 32u) {
        let place = 32u * (team / 2u) + 16u * place_part + i / 16u;
        if place >= job.count { continue; }
        let row = EACH * group.x + 32u * (team % 2u) + 16u * row_part + i % 16u;
        let both = scales[sources[place]] * vec2<f32>(results[512u * team + i], results[512u * team + 256u + i]);
        if SLOTS == 2u {
            finish(job.expert, job.first + place, row, both);
        } else {
            finish(job.expert, job.first + place, row, vec2<f32>(both.x, 0.0));
            finish(job.expert, job.first + place, row + 64u, vec2<f32>(both.y, 0.0));
        }
    }
    workgroupBarrier();
}

@compute @workgroup_size(THREADS)
fn tiles_by_matrices(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let job = job_of(group.y);
    let is_bound = find(job.expert, args.first);
    if thread == 0u { count = select(0u, job.count, is_bound); }
    workgroupBarrier();
    if count == 0u { return; }
    let cols = matrices[args.matrix0].cols;
    if thread < TOKENS { sources[thread] = source_of(job.first + min(thread, job.count - 1u)); }
    workgroupBarrier();
    let team = thread / 32u;
    let place = STRIDE * 32u * (team / 2u);
    let row = STRIDE * 32u * (team % 2u);
    // Of 16 places with 16 rows in the first half, those after them, and the same 64 rows further.
    var near_00 = coop_mat16x16<f32, C>();
    var near_01 = coop_mat16x16<f32, C>();
    var near_10 = coop_mat16x16<f32, C>();
    var near_11 = coop_mat16x16<f32, C>();
    var far_00 = coop_mat16x16<f32, C>();
    var far_01 = coop_mat16x16<f32, C>();
    var far_10 = coop_mat16x16<f32, C>();
    var far_11 = coop_mat16x16<f32, C>();
    for (var index = 0u; 32u * index < cols; index++) {
        load_all(group, thread, index);
        workgroupBarrier();
        for (var k = 0u; k < 8u; k += 4u) {
            let a_0 = coopLoadT<coop_mat16x16<f16, A>>(&activations[place + k], STRIDE);
            let a_1 = coopLoadT<coop_mat16x16<f16, A>>(&activations[place + 16u * STRIDE + k], STRIDE);
            let b_0 = coopLoad<coop_mat16x16<f16, B>>(&lines[row + k], STRIDE);
            near_00 = coopMultiplyAdd(a_0, b_0, near_00);
            near_10 = coopMultiplyAdd(a_1, b_0, near_10);
            let b_1 = coopLoad<coop_mat16x16<f16, B>>(&lines[row + 16u * STRIDE + k], STRIDE);
            near_01 = coopMultiplyAdd(a_0, b_1, near_01);
            near_11 = coopMultiplyAdd(a_1, b_1, near_11);
            let b_2 = coopLoad<coop_mat16x16<f16, B>>(&lines[row + 64u * STRIDE + k], STRIDE);
            far_00 = coopMultiplyAdd(a_0, b_2, far_00);
            far_10 = coopMultiplyAdd(a_1, b_2, far_10);
            let b_3 = coopLoad<coop_mat16x16<f16, B>>(&lines[row + 80u * STRIDE + k], STRIDE);
            far_01 = coopMultiplyAdd(a_0, b_3, far_01);
            far_11 = coopMultiplyAdd(a_1, b_3, far_11);
        }
        workgroupBarrier();
    }
    coopStoreT(near_00, &results[512u * team], 16u);
    coopStoreT(far_00, &results[512u * team + 256u], 16u);
    finish_part(job, group, thread, 0u, 0u);
    coopStoreT(near_01, &results[512u * team], 16u);
    coopStoreT(far_01, &results[512u * team + 256u], 16u);
    finish_part(job, group, thread, 0u, 1u);
    coopStoreT(near_10, &results[512u * team], 16u);
    coopStoreT(far_10, &results[512u * team + 256u], 16u);
    finish_part(job, group, thread, 1u, 0u);
    coopStoreT(near_11, &results[512u * team], 16u);
    coopStoreT(far_11, &results[512u * team + 256u], 16u);
    finish_part(job, group, thread, 1u, 1u);
}
