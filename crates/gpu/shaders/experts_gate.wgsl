
// The first half of experts: activation(gate, up) or activation(up), for each place.

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

// The row of x for a place.
fn source_of(place: u32) -> u32 {
    if TILED == 0u { return place / args.top_k; }
    return tokens[place];
}

// Stores what the activation function makes of the products of a row.
fn finish(expert: u32, place: u32, row: u32, products: vec2<f32>) {
    let rows = matrices[args.matrix0].rows;
    if row >= rows { return; }
    var values = vec2<f32>(0.0);
//each {
    var factor$ = 1.0;
    var summand$ = 0.0;
    if args.scaled$ == 1u { factor$ = scale$[expert]; }
    if args.biased$ == 1u { summand$ = bias$[expert * rows + row]; }
    values[$] = fma(products[$], factor$, summand$);
//}
    out[place * rows + row] = activate(values[0], values[1], Activation(args.kind, args.alpha, args.limit));
}
