
// Rows of a matrix as floats.

struct Args { matrix: u32, width: u32 }
var<immediate> args: Args;

@group(0) @binding(#) var<storage, read> matrices: array<Matrix>;
@group(0) @binding(#) var<storage, read> rows: array<u32>;
@group(0) @binding(#) var<storage, read_write> out: array<f32>;

// out[i] = table[rows[i]]
@compute @workgroup_size(64)
fn embed(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let m = matrices[args.matrix];
    let index = 64u * group.x + thread;
    if 32u * index >= m.cols { return; }
    let g = unpack0(m, planes_of(m), rows[group.y], index);
    for (var i = 0u; i < 32u; i++) {
        let column = 32u * index + i;
        if column < m.cols { out[group.y * args.width + column] = weight_of(g, i, HAS_MIN0) * m.factor; }
    }
}
