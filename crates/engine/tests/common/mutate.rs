//! Damages a file's header at random, in ways that a careless parser does not expect.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::RngCore;

/// Damages one place.
pub fn mutate(bytes: &mut Vec<u8>, rng: &mut ChaCha8Rng) {
    if bytes.len() < 16 {
        return;
    }
    let at = position(bytes.len(), rng);
    match rng.next_u32() % 7 {
        0 => bytes[at] ^= 1 << (rng.next_u32() % 8),
        1 => bytes[at] = 0,
        2 => bytes[at] = 0xff,
        3 => overwrite(bytes, at, &(extreme(rng) as u32).to_le_bytes()),
        4 => overwrite(bytes, at, &extreme(rng).to_le_bytes()),
        5 => bytes.truncate(at),
        _ => {
            let end = (at + 1 + below(64, rng)).min(bytes.len());
            let range = bytes[at..end].to_vec();
            let to = position(bytes.len(), rng);
            bytes.splice(to..to, range);
        }
    }
}

/// A position to damage. Most of a real header is vocabulary. So its two ends, with the counts, settings and tensors,
/// are hit as often as all the rest.
fn position(len: usize, rng: &mut ChaCha8Rng) -> usize {
    let end = len.min(4096);
    match rng.next_u32() % 3 {
        0 => below(end, rng),
        1 => len - 1 - below(end, rng),
        _ => below(len, rng),
    }
}

/// An integer at or next to a boundary that a careless parser forgets.
fn extreme(rng: &mut ChaCha8Rng) -> u64 {
    const BOUNDARIES: [u64; 10] =
        [0, 0xff, 0xffff, 65_536, 1 << 24, 0x7fff_ffff, 0xffff_ffff, 1 << 40, i64::MAX as u64, u64::MAX];
    BOUNDARIES[below(BOUNDARIES.len(), rng)].wrapping_add(rng.next_u64() % 3).wrapping_sub(1)
}

fn overwrite(bytes: &mut [u8], at: usize, with: &[u8]) {
    for (to, from) in bytes[at..].iter_mut().zip(with) {
        *to = *from;
    }
}

fn below(limit: usize, rng: &mut ChaCha8Rng) -> usize {
    (rng.next_u64() % limit as u64) as usize
}
