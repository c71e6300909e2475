
// Matrices of the chosen experts: which are computed, and where they are.

@group(0) @binding(#) var<storage, read> matrices: array<Matrix>;
// For each expert of the layer: the arena that has it, or NOWHERE, and the byte where each of its ranges starts there.
@group(0) @binding(#) var<storage, read> table: array<u32>;
// Either the expert of each pair, or tiles: an expert, the first of its places, how many there are, and nothing.
@group(0) @binding(#) var<storage, read> jobs: array<u32>;
@group(0) @binding(#) var<storage, read> x: array<f32>;
@group(0) @binding(#) var<storage, read_write> out: array<f32>;

// The current expert's words in the table, of which each expert has ENTRY.
var<private> entry: u32;

// Rows of x for one expert.
struct Job { expert: u32, first: u32, count: u32 }

fn job_of(number: u32) -> Job {
    if TILED == 0u { return Job(jobs[number], number, 1u); }
    return Job(jobs[4u * number], jobs[4u * number + 1u], jobs[4u * number + 2u]);
}

// Makes an expert the current one. False if its arena is not bound.
fn find(expert: u32, first_arena: u32) -> bool {
    entry = ENTRY * expert;
    arena = table[entry] - first_arena;
    return arena < WINDOW;
}

// Where the current expert's matrix begins. `ranges` has the numbers of the ranges of codes, scales and biases.
fn planes_in(m: Matrix, ranges: u32) -> Planes {
    return Planes(m.codes + table[entry + 1u + (ranges & 255u)],
                  m.scales + table[entry + 1u + ((ranges >> 8u) & 255u)],
                  m.biases + table[entry + 1u + (ranges >> 16u)]);
}

fn fours(at: u32, left: u32) -> vec4<f32> {
    if left >= 4u { return vec4<f32>(x[at], x[at + 1u], x[at + 2u], x[at + 3u]); }
    var four = vec4<f32>(0.0);
    for (var i = 0u; i < left; i++) { four[i] = x[at + i]; }
    return four;
}

//each {
// Adds the products of 32 weights of slot $ and those of x from `at` on.
fn accumulate$(before: f32, g: Group, left: u32, at: u32) -> f32 {
    var sum = before;
    for (var half = 0u; half < 2u; half++) {
        var products = vec4<f32>(0.0);
        var values = vec4<f32>(0.0);
        for (var i = 4u * half; i < 4u * half + 4u; i++) {
            if 4u * i < left {
                let four = fours(at + 4u * i, left - 4u * i);
                products = fma(g.lanes[i], four, products);
                if HAS_MIN$ { values += four; }
            }
        }
        sum = fma(g.scale[half], dot(products, vec4<f32>(1.0)), sum);
        if HAS_MIN$ { sum = fma(g.min[half], dot(values, vec4<f32>(1.0)), sum); }
    }
    return sum;
}
//}
