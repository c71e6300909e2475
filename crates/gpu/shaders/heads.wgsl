
// Products of each head with its own matrix: out[h] = [rest | W[h] part], where x[h] = [part | rest].

struct Args {
    matrix: u32,
    heads: u32,
    first: u32, // the first of a head's rows that belongs to its matrix
    rows: u32,  // and how many do
    cols: u32,  // numbers in a part
    x_width: u32,
    out_width: u32,
}
var<immediate> args: Args;

@group(0) @binding(#) var<storage, read> matrices: array<Matrix>;
@group(0) @binding(#) var<storage, read> x: array<f32>;
@group(0) @binding(#) var<storage, read_write> out: array<f32>;

// The first row of a head's matrix.
fn first_row(m: Matrix, head: u32) -> u32 { return head * (m.rows / args.heads) + args.first; }

// Copies the rest. The first workgroup of a head's does.
fn copy_rest(group: vec3<u32>, thread: u32) {
    if group.x != 0u { return; }
    let head_dim = args.x_width / args.heads;
    let origin = group.z * args.x_width + group.y * head_dim + args.cols;
    let there = group.z * args.out_width + group.y * (args.out_width / args.heads);
    for (var i = thread; i < head_dim - args.cols; i += 256u) { out[there + i] = x[origin + i]; }
}

// Each 32 threads compute one number.
@compute @workgroup_size(256)
fn head_products(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let m = matrices[args.matrix];
    copy_rest(group, thread);
    let head_dim = args.x_width / args.heads;
    let row = 8u * group.x + thread / 32u;
    let at = group.z * args.x_width + group.y * head_dim;
    var sum = 0.0;
    if row < args.rows {
        for (var index = thread % 32u; 32u * index < args.cols; index += 32u) {
            let g = unpack0(m, planes_of(m), first_row(m, group.y) + row, index);
            for (var i = 0u; i < 32u; i++) {
                let column = 32u * index + i;
                if column < args.cols { sum = fma(weight_of(g, i, HAS_MIN0), x[at + column], sum); }
            }
        }
    }
    sum = sum_32(thread, sum);
    let rest = head_dim - args.cols;
    let there = group.z * args.out_width + group.y * (args.out_width / args.heads);
    if thread % 32u == 0u && row < args.rows { out[there + rest + row] = sum * m.factor; }
}

// What eight threads have for each of eight columns of 32 groups.
var<workgroup> parts: array<f32, 2048>;

// The stored rows are the columns of the head's matrix. Eight threads share 32 numbers.
@compute @workgroup_size(256)
fn head_products_transposed(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let m = matrices[args.matrix];
    copy_rest(group, thread);
    let head_dim = args.x_width / args.heads;
    let index = 32u * group.x + thread / 8u;
    let at = group.z * args.x_width + group.y * head_dim;
    var sums = array<vec4<f32>, 8>();
    if 32u * index < m.cols {
        for (var row = thread % 8u; row < args.cols; row += 8u) {
            let g = unpack0(m, planes_of(m), first_row(m, group.y) + row, index);
            let value = x[at + row];
            for (var i = 0u; i < 8u; i++) {
                var weights = g.scale[i / 4u] * g.lanes[i];
                if HAS_MIN0 { weights = fma(vec4<f32>(g.scale[i / 4u]), g.lanes[i], vec4<f32>(g.min[i / 4u])); }
                sums[i] = fma(weights, vec4<f32>(value), sums[i]);
            }
        }
    }
    let there = group.z * args.out_width + group.y * (args.out_width / args.heads) + head_dim - args.cols;
    for (var pair = 0u; pair < 4u; pair++) {
        for (var i = 0u; i < 8u; i++) { parts[256u * i + thread] = sums[2u * pair + i / 4u][i % 4u]; }
        workgroupBarrier();
        // This thread adds up one column.
        let column = 32u * index + 8u * pair + thread % 8u;
        var sum = 0.0;
        for (var i = 0u; i < 8u; i++) { sum += parts[256u * (thread % 8u) + thread / 8u * 8u + i]; }
        if column < m.cols { out[there + column] = sum * m.factor; }
        workgroupBarrier();
    }
}
