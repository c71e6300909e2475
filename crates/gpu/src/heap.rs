//! Memory in which pieces of any size come and go. Kernels have no pointers, but they can reach a few buffers at once:
//! the heap's blocks.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_engine::{Error, Result};

use crate::device::{Gpu, Memory, Span};

/// Pieces start at multiples of this many bytes.
pub const UNIT: u64 = 256;

/// The most blocks.
pub const BLOCKS: usize = 8;

/// Bits of an address that are the piece's place in its block, in units; the others are the block's number.
const PLACE_BITS: u32 = 28;

/// Bytes of the first block. Each of the next few is twice as large as the one before; then they grow faster, because
/// there are so few.
const FIRST_BLOCK: u64 = 8 << 20;
const SLOWLY: usize = 4;

/// What the memory is used for.
const PURPOSE: &str = "conversations";

/// Where a piece is: the number of its block, and its place there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address(u32);

impl Address {
    fn new(block: usize, unit: u64) -> Address {
        Address((block as u32) << PLACE_BITS | unit as u32)
    }

    /// The address as kernels read it.
    pub fn for_kernels(self) -> u32 {
        self.0
    }

    fn block(self) -> usize {
        (self.0 >> PLACE_BITS) as usize
    }

    fn unit(self) -> u64 {
        u64::from(self.0 & ((1 << PLACE_BITS) - 1))
    }
}

/// Memory for pieces.
pub struct Heap {
    gpu: Arc<Gpu>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    blocks: [Option<Block>; BLOCKS],
    /// Through this, pieces are copied: wgpu copies nothing within one buffer.
    between: Option<Memory>,
}

struct Block {
    memory: Memory,
    free: FreeList,
}

impl Heap {
    /// A heap without memory.
    pub fn new(gpu: &Arc<Gpu>) -> Arc<Heap> {
        Arc::new(Heap { gpu: Arc::clone(gpu), state: Mutex::default() })
    }

    /// The buffers of all blocks by their number, up to the last one that exists.
    pub fn blocks(&self) -> Vec<Option<Span>> {
        let state = self.lock();
        let count = state.blocks.iter().rposition(Option::is_some).map_or(0, |last| last + 1);
        state.blocks[..count].iter().map(|block| block.as_ref().map(|block| block.memory.whole())).collect()
    }

    /// Takes memory for a piece, with arbitrary contents.
    ///
    /// # Errors
    /// If there is not enough.
    pub fn take(&self, bytes: u64) -> Result<Address> {
        let units = bytes.div_ceil(UNIT).max(1);
        let mut state = self.lock();
        for (number, block) in state.blocks.iter_mut().enumerate() {
            if let Some(unit) = block.as_mut().and_then(|block| block.free.take(units)) {
                return Ok(Address::new(number, unit));
            }
        }
        let number = state.blocks.iter().position(Option::is_none).ok_or_else(|| self.full(&state, bytes))?;
        let memory = self.new_block(&state.blocks, units * UNIT)?;
        let mut free = FreeList::new(memory.bytes() / UNIT);
        let unit = free.take(units).expect("a new block is large enough");
        state.blocks[number] = Some(Block { memory, free });
        Ok(Address::new(number, unit))
    }

    /// Takes a piece back. Work that was submitted with it ends before later work begins.
    pub fn give_back(&self, address: Address, bytes: u64) {
        let mut state = self.lock();
        let slot = &mut state.blocks[address.block()];
        let block = slot.as_mut().expect("the piece is in it");
        block.free.give_back(address.unit(), bytes.div_ceil(UNIT).max(1));
        if block.free.is_whole(block.memory.bytes() / UNIT) {
            *slot = None;
        }
        if state.blocks.iter().all(Option::is_none) {
            state.between = None;
        }
    }

    /// Copies a piece, after everything submitted.
    ///
    /// # Errors
    /// If there is no memory, or the GPU failed.
    pub fn copy(&self, from: Address, to: Address, bytes: u64) -> Result<()> {
        let mut state = self.lock();
        let bytes = bytes.next_multiple_of(4);
        if state.between.as_ref().is_none_or(|between| between.bytes() < bytes) {
            state.between = Some(self.gpu.allocate(bytes, "scratch")?);
        }
        let between = state.between.as_ref().expect("it was just made").whole();
        let (from, to) = (state.place(from, bytes), state.place(to, bytes));
        let mut encoder = self.gpu.device.create_command_encoder(&Default::default());
        encoder.copy_buffer_to_buffer(&from.buffer, from.start, &between.buffer, 0, bytes);
        encoder.copy_buffer_to_buffer(&between.buffer, 0, &to.buffer, to.start, bytes);
        self.gpu.submit_later(encoder.finish(), Vec::new());
        self.gpu.submit().map(drop)
    }

    /// Copies a piece to RAM, after everything submitted.
    ///
    /// # Errors
    /// If the GPU fails.
    pub fn read(&self, from: Address, out: &mut [u8]) -> Result<()> {
        let bytes = (out.len() as u64).next_multiple_of(4);
        let from = self.lock().place(from, bytes);
        let buffer = self.gpu.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("a saved piece"),
            size: bytes,
            usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        let mut encoder = self.gpu.device.create_command_encoder(&Default::default());
        encoder.copy_buffer_to_buffer(&from.buffer, from.start, &buffer, 0, bytes);
        self.gpu.submit_later(encoder.finish(), Vec::new());
        let submission = self.gpu.submit()?;
        buffer.slice(..).map_async(wgpu::MapMode::Read, |_| {});
        self.gpu.wait(submission.as_ref())?;
        let mapped = buffer.slice(..).get_mapped_range();
        let mapped = mapped
            .map_err(|error| Error::Backend(format!("{} cannot be read from: {error}", self.gpu.name())))?;
        out.copy_from_slice(&mapped[..out.len()]);
        Ok(())
    }

    /// Writes a piece, after everything submitted.
    ///
    /// # Errors
    /// If the GPU failed.
    pub fn write(&self, to: Address, bytes: &[u8]) -> Result<()> {
        let to = self.lock().place(to, bytes.len() as u64);
        self.gpu.submit()?;
        self.gpu.queue.write_buffer(&to.buffer, to.start, bytes);
        self.gpu.check()
    }

    /// Allocates a block for at least this many bytes.
    fn new_block(&self, blocks: &[Option<Block>], bytes: u64) -> Result<Memory> {
        let limits = &self.gpu.limits;
        let most = limits.max_storage_buffer_binding_size.min(limits.max_buffer_size) / UNIT * UNIT;
        if bytes > most {
            return Err(Error::Unsupported(format!(
                "a conversation's state in pieces of {bytes} bytes, but kernels of {} reach {most}; use \
                 Options::device = None",
                self.gpu.name()
            )));
        }
        let there = blocks.iter().flatten();
        let growth = if there.clone().count() < SLOWLY { 2 } else { 4 };
        let largest = there.map(|block| block.memory.bytes()).max();
        let mut size = largest.map_or(FIRST_BLOCK, |largest| growth * largest).max(bytes).min(most);
        loop {
            match self.gpu.allocate(size, PURPOSE) {
                // Less may be left than would be convenient.
                Err(_) if size > bytes => size = (size / 2).next_multiple_of(UNIT).max(bytes),
                result => return result,
            }
        }
    }

    fn full(&self, state: &State, bytes: u64) -> Error {
        let have: u64 = state.blocks.iter().flatten().map(|block| block.memory.bytes()).sum();
        Error::Budget {
            need: have + bytes,
            have,
            what: format!("in the {BLOCKS} blocks of {PURPOSE} on {}", self.gpu.name()),
            remedy: "ask for a shorter context with Options::context, or use Options::device = None".into(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// The part of a buffer that has a piece.
    fn place(&self, address: Address, bytes: u64) -> Span {
        let block = self.blocks[address.block()].as_ref().expect("the piece is in it");
        block.memory.whole().part(address.unit() * UNIT, bytes)
    }
}

/// The free parts of a block, in units.
struct FreeList {
    /// Their lengths, by where they start. No two touch each other.
    parts: BTreeMap<u64, u64>,
}

impl FreeList {
    /// All of a block.
    fn new(units: u64) -> FreeList {
        FreeList { parts: BTreeMap::from([(0, units)]) }
    }

    /// Takes the first part that is long enough.
    fn take(&mut self, units: u64) -> Option<u64> {
        let (start, length) = self.parts.iter().find(|&(_, &length)| length >= units)?;
        let (start, length) = (*start, *length);
        self.parts.remove(&start);
        if length > units {
            self.parts.insert(start + units, length - units);
        }
        Some(start)
    }

    /// Takes a part back.
    fn give_back(&mut self, mut start: u64, mut units: u64) {
        if let Some((&before, &length)) = self.parts.range(..start).next_back() {
            assert!(before + length <= start, "it was not free");
            if before + length == start {
                (start, units) = (before, units + length);
            }
        }
        if let Some(length) = self.parts.remove(&(start + units)) {
            units += length;
        }
        self.parts.insert(start, units);
    }

    /// Whether everything is free.
    fn is_whole(&self, units: u64) -> bool {
        self.parts.get(&0) == Some(&units)
    }
}

#[cfg(test)]
mod tests {
    use forebay_testing::{Need, skipped};

    use super::*;
    use crate::device::Variants;
    use crate::find::find;

    #[test]
    fn pieces_in_every_block_keep_their_bytes() {
        const BYTES: usize = 5 << 20;
        const PIECES: u8 = 9;
        let found = match find() {
            Ok(found) => found,
            Err(why) => return skipped(Need::PortableGpu, why),
        };
        let gpu = Gpu::open(&found[0], None, Variants::ALL).unwrap();
        let heap = Heap::new(&gpu);
        let bytes = |number: u8| (0..BYTES).map(|i| (i / 1000) as u8 ^ number).collect::<Vec<u8>>();
        let used = || gpu.used().iter().find(|(what, _)| *what == PURPOSE).map_or(0, |(_, bytes)| *bytes);
        let take = |number| {
            let address = heap.take(BYTES as u64).unwrap();
            heap.write(address, &bytes(number)).unwrap();
            address
        };
        let pieces: Vec<Address> = (0..PIECES).map(take).collect();
        assert!(heap.blocks().len() > 2 && used() >= u64::from(PIECES) * BYTES as u64);
        // To another block, and within one.
        for (from, to) in [(0, 8), (7, 6)] {
            heap.copy(pieces[from], pieces[to], BYTES as u64).unwrap();
        }
        for (piece, number) in pieces.iter().zip([0, 1, 2, 3, 4, 5, 7, 7, 0]) {
            let mut read = vec![0; BYTES];
            heap.read(*piece, &mut read).unwrap();
            assert!(read == bytes(number), "piece {number}");
        }
        pieces.iter().for_each(|&piece| heap.give_back(piece, BYTES as u64));
        assert_eq!(used(), 0);
    }

    #[test]
    fn free_parts_grow_together_again() {
        let mut free = FreeList::new(10);
        let [a, b, c] = [3, 4, 3].map(|units| free.take(units).unwrap());
        assert_eq!(([a, b, c], free.take(1)), ([0, 3, 7], None));
        free.give_back(a, 3);
        free.give_back(c, 3);
        assert!(free.take(4).is_none() && !free.is_whole(10));
        free.give_back(b, 4);
        assert!(free.is_whole(10));
        assert_eq!([free.take(2), free.take(8), free.take(1)], [Some(0), Some(2), None]);
    }

    #[test]
    fn an_address_has_the_block_and_the_place() {
        for (block, unit) in [(0, 0), (7, 1), (3, (1 << PLACE_BITS) - 1)] {
            let address = Address::new(block, unit);
            assert_eq!((address.block(), address.unit()), (block, unit));
        }
    }
}
