
// Products of matrices with single rows of activations.

struct Args {
    x_width: u32, // floats between rows of x
//each {
    matrix$: u32,
    width$: u32, // floats between rows of the output
    end$: u32,   // the first workgroup after those of this product
//}
}
var<immediate> args: Args;

@group(0) @binding(#) var<storage, read> matrices: array<Matrix>;
@group(0) @binding(#) var<storage, read> x: array<f32>;
//each {
@group(0) @binding(#) var<storage, read_write> out$: array<f32>;
//}

fn fours(at: u32, left: u32) -> vec4<f32> {
    if left >= 4u { return vec4<f32>(x[at], x[at + 1u], x[at + 2u], x[at + 3u]); }
    var four = vec4<f32>(0.0);
    for (var i = 0u; i < left; i++) { four[i] = x[at + i]; }
    return four;
}

//each {
// This thread's part of the product of a row of slot $ and the row of x at `from`: every 32nd group.
fn partial$(m: Matrix, row: u32, at: u32, lane: u32) -> f32 {
    var sum = 0.0;
    for (var index = lane; 32u * index < m.cols; index += 32u) {
        let g = unpack$(m, planes_of(m), row, index);
        for (var half = 0u; half < 2u; half++) {
            var products = vec4<f32>(0.0);
            var values = vec4<f32>(0.0);
            for (var i = 4u * half; i < 4u * half + 4u; i++) {
                let column = 32u * index + 4u * i;
                if column < m.cols {
                    let four = fours(at + column, m.cols - column);
                    products = fma(g.lanes[i], four, products);
                    if HAS_MIN$ { values += four; }
                }
            }
            sum = fma(g.scale[half], dot(products, vec4<f32>(1.0)), sum);
            if HAS_MIN$ { sum = fma(g.min[half], dot(values, vec4<f32>(1.0)), sum); }
        }
    }
    return sum * m.factor;
}
//}

// Each 32 threads compute one number: eight rows of one product per workgroup.
@compute @workgroup_size(256)
fn matvec(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let lane = thread % 32u;
    let token = group.y;
    var sum = 0.0;
    var first = 0u;
    var row = 0u;
//each {
    if group.x >= first && group.x < args.end$ {
        row = 8u * (group.x - first) + thread / 32u;
        let m = matrices[args.matrix$];
        if row < m.rows { sum = partial$(m, row, token * args.x_width, lane); }
    }
    first = args.end$;
//}
    sum = sum_32(thread, sum);
    if lane != 0u { return; }
    first = 0u;
//each {
    if group.x >= first && group.x < args.end$ && row < matrices[args.matrix$].rows {
        out$[token * args.width$ + row] = sum;
    }
    first = args.end$;
//}
}
