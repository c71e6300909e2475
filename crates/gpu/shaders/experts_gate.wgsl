
// The first half of experts: activation(gate, up) or activation(up), for each place of a tile.

struct Args {
    first: u32, // the first arena that is bound
    x_width: u32,
    top_k: u32,
    kind: u32,
    alpha: f32,
    limit: f32,
//each {
    matrix$: u32,
    ranges$: u32,
    biased$: u32,
    scaled$: u32,
//}
}
var<immediate> args: Args;

@group(0) @binding(#) var<storage, read> tokens: array<u32>; // [places], for tiles
//each {
@group(0) @binding(#) var<storage, read> bias$: array<f32>;  // [experts, rows]
@group(0) @binding(#) var<storage, read> scale$: array<f32>; // [experts]
//}

// Each 32 threads compute a row of the products, for all places of the tile.
@compute @workgroup_size(256)
fn gate_up(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let job = job_of(group.y);
    if job.count == 0u || !find(job.expert, args.first) { return; }
    let lane = thread % 32u;
    let row = 8u * group.x + thread / 32u;
    let rows = matrices[args.matrix0].rows;
    var starts: array<u32, ROWS>;
    for (var r = 0u; r < job.count; r++) {
        if TILED == 0u { starts[r] = job.first / args.top_k * args.x_width; }
        else { starts[r] = tokens[job.first + r] * args.x_width; }
    }
//each {
    var sums$: array<f32, ROWS>;
    {
        let m = matrices[args.matrix$];
        let planes = planes_in(m, args.ranges$);
        for (var index = lane; row < m.rows && 32u * index < m.cols; index += 32u) {
            let g = unpack$(m, planes, row, index);
            for (var r = 0u; r < job.count; r++) {
                sums$[r] = accumulate$(sums$[r], g, m.cols - 32u * index, starts[r] + 32u * index);
            }
        }
    }
//}
    for (var r = 0u; r < job.count; r++) {
        var values = vec2<f32>(0.0);
//each {
        var factor$ = 1.0;
        var summand$ = 0.0;
        if args.scaled$ == 1u { factor$ = scale$[job.expert]; }
        if args.biased$ == 1u && row < rows { summand$ = bias$[job.expert * rows + row]; }
        values[$] = fma(sum_32(thread, sums$[r]), factor$, summand$);
//}
        if lane == 0u && row < rows {
            let activation = Activation(args.kind, args.alpha, args.limit);
            out[(job.first + r) * rows + row] = activate(values[0], values[1], activation);
        }
    }
}
