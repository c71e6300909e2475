
// The second half of experts.

struct Args {
    first: u32, // the first arena that is bound
    x_width: u32,
    top_k: u32,
    biased: u32,
    scaled: u32,
    matrix: u32,
    ranges: u32,
}
var<immediate> args: Args;

@group(0) @binding(#) var<storage, read> bias: array<f32>;    // [experts, rows]
@group(0) @binding(#) var<storage, read> scale: array<f32>;   // [experts]
@group(0) @binding(#) var<storage, read> weights: array<f32>; // [rows, top_k], for sums

// What is done to a product.
fn finished(product: f32, expert: u32, row: u32, rows: u32) -> f32 {
    var factor = 1.0;
    var summand = 0.0;
    if args.scaled == 1u { factor = scale[expert]; }
    if args.biased == 1u && row < rows { summand = bias[expert * rows + row]; }
    return fma(product, factor, summand);
}

// Each 32 threads compute a row of the product, for all places of the tile.
@compute @workgroup_size(256)
fn down(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let job = job_of(group.y);
    if job.count == 0u || !find(job.expert, args.first) { return; }
    let lane = thread % 32u;
    let row = 8u * group.x + thread / 32u;
    let m = matrices[args.matrix];
    let planes = planes_in(m, args.ranges);
    var sums0: array<f32, ROWS>;
    for (var index = lane; row < m.rows && 32u * index < m.cols; index += 32u) {
        let g = unpack0(m, planes, row, index);
        for (var r = 0u; r < job.count; r++) {
            let start = (job.first + r) * args.x_width;
            sums0[r] = accumulate0(sums0[r], g, m.cols - 32u * index, start + 32u * index);
        }
    }
    for (var r = 0u; r < job.count; r++) {
        let value = finished(sum_32(thread, sums0[r]), job.expert, row, m.rows);
        if lane == 0u && row < m.rows { out[(job.first + r) * m.rows + row] = value; }
    }
}

// The same for all experts of a token, and their weighted sum in the order of ranks.
@compute @workgroup_size(256)
fn down_sum(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let lane = thread % 32u;
    let row = 8u * group.x + thread / 32u;
    let m = matrices[args.matrix];
    var total = 0.0;
    for (var k = 0u; k < args.top_k; k++) {
        let pair = group.y * args.top_k + k;
        let expert = jobs[pair];
        var sum = 0.0;
        if find(expert, args.first) {
            let planes = planes_in(m, args.ranges);
            for (var index = lane; row < m.rows && 32u * index < m.cols; index += 32u) {
                let g = unpack0(m, planes, row, index);
                sum = accumulate0(sum, g, m.cols - 32u * index, pair * args.x_width + 32u * index);
            }
        }
        total = fma(weights[pair], finished(sum_32(thread, sum), expert, row, m.rows), total);
    }
    if lane == 0u && row < m.rows { out[group.y * m.rows + row] = total; }
}
