
// Rows of activations as halves, for products of small matrices.

struct Args {
    x_width: u32,
    cols: u32,
    width: u32, // halves of a row, a multiple of 32
}
var<immediate> args: Args;

@group(0) @binding(#) var<storage, read> x: array<f32>;
@group(0) @binding(#) var<storage, read_write> halves: array<u32>;
@group(0) @binding(#) var<storage, read_write> scales: array<f32>; // of the rows

// Numbers that would be too large are divided by a power of two.
@compute @workgroup_size(256)
fn halve(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let at = group.x * args.x_width;
    var most = 0.0;
    for (var i = thread; i < args.cols; i += 256u) { most = max(most, abs(x[at + i])); }
    most = max_threads(thread, most, 256u);
    var scale = 1.0;
    while most > 16384.0 && most < INFINITE {
        most *= 0.5;
        scale *= 2.0;
    }
    for (var i = 2u * thread; i < args.width; i += 512u) {
        var two = vec2<f32>(0.0);
        if i < args.cols { two.x = x[at + i] / scale; }
        if i + 1u < args.cols { two.y = x[at + i + 1u] / scale; }
        halves[(group.x * args.width + i) / 2u] = pack2x16float(two);
    }
    if thread == 0u { scales[group.x] = scale; }
}
