
// Four numbers of type f16.
alias Cell = vec2<u32>;
const CELL_BYTES: u32 = 8u;
fn floats_of(cell: Cell) -> vec4<f32> { return vec4<f32>(unpack2x16float(cell.x), unpack2x16float(cell.y)); }
fn cell_of(floats: vec4<f32>) -> Cell { return vec2<u32>(pack2x16float(floats.xy), pack2x16float(floats.zw)); }
