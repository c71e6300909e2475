
// The heap's blocks. A piece's address is the number of its block and its place there in units of 256 bytes.

//each {
@group(0) @binding(#) var<storage, read_write> block$: array<Cell>;
//}

// Where a piece is: its block, and its first cell there.
struct Piece { block: u32, first: u32 }

fn piece_at(address: u32) -> Piece {
    return Piece(address >> 28u, (address & 0xfffffffu) * (256u / CELL_BYTES));
}

fn cell(piece: Piece, i: u32) -> Cell {
    if BLOCKS == 1u { return block0[piece.first + i]; }
    switch piece.block {
//each {
        case $u: { return block$[piece.first + i]; }
//}
        default: { return Cell(); }
    }
}

// What is read before any of it is used, so that the GPU waits for memory less often.
const AHEAD: u32 = 8u;

// Cells of a piece: every `step`th from `i` on, and the last one instead of any beyond it. The block is looked up once.
fn cells(piece: Piece, i: u32, step: u32, last: u32) -> array<Cell, AHEAD> {
    var read: array<Cell, AHEAD>;
    switch piece.block {
//each {
        case $u: {
            for (var j = 0u; j < AHEAD; j++) { read[j] = block$[piece.first + min(i + step * j, last)]; }
        }
//}
        default: {}
    }
    return read;
}

fn set_cell(piece: Piece, i: u32, value: Cell) {
    if BLOCKS == 1u {
        block0[piece.first + i] = value;
        return;
    }
    switch piece.block {
//each {
        case $u: { block$[piece.first + i] = value; }
//}
        default: {}
    }
}
