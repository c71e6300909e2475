//! One GPU: its context, its stream and its memory.

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_void;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::{CUdevice_attribute, CUevent_flags};
use cudarc::driver::{DriverError, result, sys};
use forebay_engine::internals::memory::SharedBytes;
use forebay_engine::{Bytes, Error, Result};

/// An address in the GPU's memory.
pub type Address = u64;

/// Pieces of states that are allocated together.
const SLAB: u64 = 8 << 20;

/// A GPU that is in use.
pub struct Gpu {
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    copies: sys::CUstream,
    /// Nothing ever runs on it: graphs are recorded there, since what other threads do meanwhile on the first would become a part of them.
    recording: sys::CUstream,
    /// Its number.
    pub ordinal: usize,
    /// What the maker calls it.
    pub name: String,
    /// Major and minor compute capability.
    pub capability: (i32, i32),
    /// How many blocks run truly at once is a multiple of these.
    pub multiprocessors: u32,
    /// The most shared memory that a block may ask for.
    pub shared_limit: u32,
    /// Bytes that models may use.
    pub budget: u64,
    /// Bytes by purpose.
    used: Mutex<BTreeMap<&'static str, u64>>,
    pieces: Mutex<PiecePool>,
    /// Parts of the computer's memory that it copies from by itself: where each starts and ends.
    pinned: Mutex<BTreeMap<usize, usize>>,
}

/// A CUDA stream: what is started on it happens in order, beside what happens on the other one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Everything but the following.
    Compute,
    /// Experts on their way.
    Copies,
}

/// Memory for states, which is kept for the next state.
#[derive(Default)]
struct PiecePool {
    /// By bytes of a piece.
    free: HashMap<u64, Vec<Address>>,
    slabs: Vec<Slab>,
}

/// Pieces that were allocated together.
struct Slab {
    first: Address,
    /// Of all of them.
    bytes: u64,
    /// Of each, and how many there are.
    piece: u64,
    count: u64,
}

// SAFETY: the handles are the driver's, which any thread may use; what they stand for is not changed after creation.
unsafe impl Send for Gpu {}
// SAFETY: as above, and what does change is behind a mutex or atomic.
unsafe impl Sync for Gpu {}

/// What the driver says of the GPUs there are, without using one.
#[derive(Clone, Debug)]
pub struct Found {
    /// Its number.
    pub ordinal: usize,
    /// What the maker calls it.
    pub name: String,
    /// Bytes of memory.
    pub memory: u64,
    /// Major and minor compute capability.
    pub capability: (i32, i32),
    /// Where it is on the PCI bus, as the system writes it: `0000:3b:00.0`.
    pub bus: String,
}

/// The GPUs of this machine.
///
/// # Errors
/// Why there are none that can be used, in words for people.
pub fn find() -> std::result::Result<Vec<Found>, String> {
    // SAFETY: looks for the library and loads it, nothing else.
    if !unsafe { sys::is_culib_present() } {
        return Err("no NVIDIA driver was found".into());
    }
    let failed = |error: DriverError| format!("the NVIDIA driver does not start: {}", reason(error));
    result::init().map_err(failed)?;
    let count = result::device::get_count().map_err(failed)?;
    if count == 0 {
        return Err("the NVIDIA driver finds no GPU".into());
    }
    (0..count)
        .map(|ordinal| {
            let device = result::device::get(ordinal).map_err(failed)?;
            // SAFETY: the device is one that the driver has just named.
            let memory = unsafe { result::device::total_mem(device) }.map_err(failed)?;
            Ok(Found {
                ordinal: ordinal as usize,
                name: result::device::get_name(device).map_err(failed)?,
                memory: memory as u64,
                capability: capability(device).map_err(failed)?,
                bus: bus(device).map_err(failed)?,
            })
        })
        .collect()
}

fn attribute(device: sys::CUdevice, attribute: CUdevice_attribute) -> std::result::Result<i32, DriverError> {
    // SAFETY: the device is one that the driver has named.
    unsafe { result::device::get_attribute(device, attribute) }
}

fn capability(device: sys::CUdevice) -> std::result::Result<(i32, i32), DriverError> {
    Ok((
        attribute(device, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        attribute(device, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    ))
}

fn bus(device: sys::CUdevice) -> std::result::Result<String, DriverError> {
    let domain = attribute(device, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?;
    let bus = attribute(device, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?;
    let slot = attribute(device, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?;
    Ok(format!("{domain:04x}:{bus:02x}:{slot:02x}.0"))
}

/// The driver's words for what went wrong.
fn reason(error: DriverError) -> String {
    let name = error.error_name().map(|name| name.to_string_lossy().into_owned());
    let text = error.error_string().map(|text| text.to_string_lossy().into_owned());
    match (name, text) {
        (Ok(name), Ok(text)) => format!("{text} ({name})"),
        _ => format!("error {:?}", error.0),
    }
}

/// Bytes of the GPU's memory that are free, less what others may need in the meantime.
fn usable_memory() -> std::result::Result<u64, DriverError> {
    let free = result::mem_get_info()?.0 as u64;
    Ok(free.saturating_sub((free / 32).max(256 << 20)))
}

/// An engine's error for a driver's.
pub fn failed(doing: &str, error: DriverError) -> Error {
    let message =
        format!("the GPU cannot {doing}: {}; Options::device = None goes without it", reason(error));
    if is_fatal(error.0) { Error::DeviceLost(message) } else { Error::Backend(message) }
}

/// Whether all that is asked of the GPU fails from now on: the driver gives up a context in which a kernel went wrong, and
/// a card may be gone.
fn is_fatal(error: sys::CUresult) -> bool {
    use sys::CUresult::*;
    matches!(
        error,
        CUDA_ERROR_DEINITIALIZED
            | CUDA_ERROR_DEVICE_UNAVAILABLE
            | CUDA_ERROR_ECC_UNCORRECTABLE
            | CUDA_ERROR_NVLINK_UNCORRECTABLE
            | CUDA_ERROR_CONTAINED
            | CUDA_ERROR_ILLEGAL_ADDRESS
            | CUDA_ERROR_LAUNCH_TIMEOUT
            | CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUDA_ERROR_ASSERT
            | CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUDA_ERROR_MISALIGNED_ADDRESS
            | CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUDA_ERROR_INVALID_PC
            | CUDA_ERROR_LAUNCH_FAILED
            | CUDA_ERROR_TENSOR_MEMORY_LEAK
            | CUDA_ERROR_SYSTEM_NOT_READY
            | CUDA_ERROR_EXTERNAL_DEVICE
            | CUDA_ERROR_UNKNOWN
    )
}

impl Gpu {
    /// Takes the GPU of this number into use, of whose memory `budget` bytes may be used: by default what is free, less a
    /// margin.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn open(ordinal: usize, budget: Option<u64>) -> Result<Arc<Gpu>> {
        let open = |error| failed("be used", error);
        let device = result::device::get(ordinal as i32).map_err(open)?;
        // SAFETY: the device is one that the driver has just named; the context is released when the GPU is dropped.
        let context = unsafe { result::primary_ctx::retain(device) }.map_err(open)?;
        // SAFETY: the context was just retained.
        unsafe { result::ctx::set_current(context) }.map_err(open)?;
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking).map_err(open)?;
        let copies = result::stream::create(result::stream::StreamKind::NonBlocking).map_err(open)?;
        let recording = result::stream::create(result::stream::StreamKind::NonBlocking).map_err(open)?;
        let usable = usable_memory().map_err(open)?;
        if let Some(budget) = budget.filter(|&budget| budget > usable) {
            tracing::warn!("{} of the GPU's memory are free, not {}", Bytes(usable), Bytes(budget));
        }
        let number = |which| attribute(device, which).map(|n| n as u32).map_err(open);
        Ok(Arc::new(Gpu {
            device,
            context,
            stream,
            copies,
            recording,
            ordinal,
            name: result::device::get_name(device).map_err(open)?,
            capability: capability(device).map_err(open)?,
            multiprocessors: number(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_limit: number(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            budget: budget.map_or(usable, |budget| budget.min(usable)),
            used: Mutex::default(),
            pieces: Mutex::default(),
            pinned: Mutex::default(),
        }))
    }

    /// Whether kernels may start while the one before them ends, in graphs, too: on GPUs of compute capability 9.0 and
    /// with drivers for CUDA 12.3.
    pub fn overlaps(&self) -> bool {
        let mut version = 0;
        // SAFETY: the driver writes one number.
        let asked = unsafe { sys::cuDriverGetVersion(&raw mut version) }.result();
        self.capability >= (9, 0) && asked.is_ok() && version >= 12_030
    }

    /// Makes the calling thread one that works with this GPU.
    pub fn enter(&self) -> Result<()> {
        // SAFETY: the context lives as long as the GPU.
        unsafe { result::ctx::set_current(self.context) }.map_err(|error| failed("be used", error))
    }

    /// The stream on which everything happens, in order.
    pub fn stream(&self) -> sys::CUstream {
        self.stream
    }

    /// The stream on which graphs are recorded.
    pub fn recording(&self) -> sys::CUstream {
        self.recording
    }

    fn handle(&self, stream: Stream) -> sys::CUstream {
        match stream {
            Stream::Compute => self.stream,
            Stream::Copies => self.copies,
        }
    }

    /// Waits until everything that was started, but for copies of experts, has ended.
    ///
    /// # Errors
    /// If any of it failed.
    pub fn wait(&self) -> Result<()> {
        self.wait_for(Stream::Compute)
    }

    /// Waits until everything that was started on a stream has ended.
    ///
    /// # Errors
    /// If any of it failed.
    pub fn wait_for(&self, stream: Stream) -> Result<()> {
        self.enter()?;
        // SAFETY: the stream lives as long as the GPU.
        unsafe { result::stream::synchronize(self.handle(stream)) }.map_err(|error| failed("compute", error))
    }

    /// Memory of so many bytes, for `what`.
    ///
    /// # Errors
    /// If there is none, or the budget does not allow it.
    pub fn allocate(self: &Arc<Gpu>, bytes: usize, what: &'static str) -> Result<Memory> {
        let address = self.take(bytes as u64, what)?;
        Ok(Memory { gpu: self.clone(), address, bytes, what })
    }

    fn counts(&self) -> MutexGuard<'_, BTreeMap<&'static str, u64>> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes in use, by purpose.
    pub fn used(&self) -> Vec<(&'static str, u64)> {
        self.counts().iter().map(|(what, bytes)| (*what, *bytes)).collect()
    }

    /// Bytes of the budget that are in no use.
    pub fn unused(&self) -> u64 {
        self.budget.saturating_sub(self.counts().values().sum())
    }

    /// Sees to it that others have left so many bytes.
    ///
    /// # Errors
    /// If they have not.
    pub fn has_free(&self, bytes: u64) -> Result<()> {
        self.enter()?;
        let (free, _) = result::mem_get_info().map_err(|error| failed("tell what is free", error))?;
        if free as u64 >= bytes {
            return Ok(());
        }
        let (free, bytes) = (Bytes(free as u64), Bytes(bytes));
        Err(Error::Backend(format!(
            "the GPU has {free} left where {bytes} are needed: other programs use its memory"
        )))
    }

    fn take(&self, bytes: u64, what: &'static str) -> Result<Address> {
        let mut counts = self.counts();
        let used: u64 = counts.values().sum();
        if used.saturating_add(bytes) > self.budget {
            return Err(Error::Budget {
                need: used.saturating_add(bytes),
                have: self.budget,
                what: format!("on the GPU, {} of it for {what}", Bytes(bytes)),
                remedy: "raise the device's memory limit, or use Options::device = None".into(),
            });
        }
        self.enter()?;
        // SAFETY: the address is freed once, by whoever has it.
        let address = unsafe { result::malloc_sync((bytes as usize).max(16)) }
            .map_err(|error| match error.0 {
                sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => Error::Backend(format!(
                    "the GPU is out of memory: {} for {what} are not free; end other programs that use it, lower the device's memory limit, \
                     or use Options::device = None",
                    Bytes(bytes)
                )),
                _ => failed(&format!("find {} of its memory for {what}", Bytes(bytes)), error),
            })?;
        *counts.entry(what).or_default() += bytes;
        Ok(address)
    }

    fn free(&self, address: Address, bytes: u64, what: &'static str) {
        if self.enter().is_ok() {
            // SAFETY: the address was allocated by `take`, and nobody has it any more. A device that is lost has no
            // memory to give back.
            let _ = unsafe { result::free_sync(address) };
        }
        *self.counts().entry(what).or_default() -= bytes;
    }

    /// A piece of a state. It holds anything.
    pub(crate) fn take_piece(&self, bytes: u64) -> Result<Address> {
        let mut pool = self.pieces.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(address) = pool.free.get_mut(&bytes).and_then(Vec::pop) {
            return Ok(address);
        }
        let stride = bytes.next_multiple_of(256);
        let count = (SLAB / stride).max(1);
        let (slab, count) = match self.take(count * stride, "conversations") {
            Ok(slab) => (slab, count),
            Err(_) => {
                // States of another size may have left room behind.
                let one = self.take(stride, "conversations").or_else(|_| {
                    self.wait()?;
                    self.trim(&mut pool);
                    self.take(stride, "conversations")
                })?;
                (one, 1)
            }
        };
        pool.slabs.push(Slab { first: slab, bytes: count * stride, piece: bytes, count });
        pool.free.entry(bytes).or_default().extend((1..count).map(|i| slab + i * stride));
        Ok(slab)
    }

    /// Takes a piece back, for the next state that needs one. What was started with it before ends before that.
    pub(crate) fn return_piece(&self, address: Address, bytes: u64) {
        let mut pool = self.pieces.lock().unwrap_or_else(PoisonError::into_inner);
        pool.free.entry(bytes).or_default().push(address);
    }

    /// Gives the memory of pieces back of which no state has one.
    pub(crate) fn trim_pieces(&self) {
        self.trim(&mut self.pieces.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn trim(&self, pool: &mut PiecePool) {
        let PiecePool { free, slabs } = pool;
        slabs.retain(|slab| {
            let inside = |address: &Address| (slab.first..slab.first + slab.bytes).contains(address);
            let of_size = free.entry(slab.piece).or_default();
            if (of_size.iter().filter(|&address| inside(address)).count() as u64) < slab.count {
                return true;
            }
            of_size.retain(|address| !inside(address));
            self.free(slab.first, slab.bytes, "conversations");
            false
        });
    }

    /// Copies bytes to the GPU, after everything that was started.
    pub fn write(&self, to: Address, bytes: &[u8]) -> Result<()> {
        self.enter()?;
        // SAFETY: the caller owns the memory there, and the bytes live until the wait below is over.
        unsafe { result::memcpy_htod_async(to, bytes, self.stream) }.map_err(|e| failed("take data", e))?;
        self.wait()
    }

    /// Copies bytes to the GPU in the line of copies, without waiting for it.
    ///
    /// # Safety
    /// The bytes must stay what they are, and the memory there the caller's, until the copy has ended.
    pub unsafe fn bring(&self, to: Address, bytes: &[u8]) -> Result<()> {
        self.enter()?;
        // SAFETY: the caller's promise.
        unsafe { result::memcpy_htod_async(to, bytes, self.copies) }.map_err(|e| failed("take experts", e))
    }

    /// Whether the GPU copies from these bytes by itself.
    pub fn is_pinned(&self, bytes: &[u8]) -> bool {
        let (first, end) = (bytes.as_ptr().addr(), bytes.as_ptr().addr() + bytes.len());
        let pinned = self.pinned.lock().unwrap_or_else(PoisonError::into_inner);
        pinned.range(..=first).next_back().is_some_and(|(_, &pinned)| end <= pinned)
    }

    /// Copies bytes from the GPU, after everything that was started.
    pub fn read(&self, from: Address, bytes: &mut [u8]) -> Result<()> {
        self.enter()?;
        // SAFETY: the caller owns the memory there, and the bytes live until the wait below is over.
        unsafe { result::memcpy_dtoh_async(bytes, from, self.stream) }.map_err(|e| failed("compute", e))?;
        self.wait()
    }

    /// Starts to copy bytes to the GPU, after everything that was started. They must stay until that has ended.
    pub fn send(&self, to: Address, bytes: &[u8]) -> Result<()> {
        self.enter()?;
        // SAFETY: the caller owns the memory there, and waits before the bytes go.
        unsafe { result::memcpy_htod_async(to, bytes, self.stream) }.map_err(|e| failed("take data", e))
    }

    /// Copies bytes inside the GPU, after everything that was started.
    pub fn copy(&self, from: Address, to: Address, bytes: usize) -> Result<()> {
        self.enter()?;
        // SAFETY: the caller owns both, and what is freed later is freed after the stream has come there.
        unsafe { result::memcpy_dtod_async(to, from, bytes, self.stream) }.map_err(|e| failed("copy", e))
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if self.enter().is_err() {
            return;
        }
        let pool = self.pieces.get_mut().unwrap_or_else(PoisonError::into_inner);
        for slab in pool.slabs.drain(..) {
            // SAFETY: nobody has a piece of it any more, since pieces keep the GPU.
            let _ = unsafe { result::free_sync(slab.first) };
        }
        for stream in [self.stream, self.copies, self.recording] {
            // SAFETY: everything that used the streams and the context is gone.
            let _ = unsafe { result::stream::destroy(stream) };
        }
        // SAFETY: it was retained once.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

/// Memory of the GPU, given back when it is dropped.
pub struct Memory {
    gpu: Arc<Gpu>,
    address: Address,
    bytes: usize,
    what: &'static str,
}

impl Memory {
    /// Where it is.
    pub fn address(&self) -> Address {
        self.address
    }

    /// How much it is.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.gpu.free(self.address, self.bytes as u64, self.what);
    }
}

/// Memory of the computer that the GPU copies from by itself.
pub struct Pinned {
    gpu: Arc<Gpu>,
    first: *mut u8,
    bytes: usize,
}

// SAFETY: it is owned memory like a vector's.
unsafe impl Send for Pinned {}

impl Pinned {
    /// So many bytes.
    ///
    /// # Errors
    /// If the system has no such memory.
    pub fn new(gpu: &Arc<Gpu>, bytes: usize) -> Result<Pinned> {
        gpu.enter()?;
        // SAFETY: freed once, when dropped.
        let first = unsafe { result::malloc_host(bytes, sys::CU_MEMHOSTALLOC_DEVICEMAP) }
            .map_err(|e| failed("pin memory", e))?
            .cast::<u8>();
        // SAFETY: so many bytes were allocated.
        unsafe { first.write_bytes(0, bytes) };
        Ok(Pinned { gpu: gpu.clone(), first, bytes })
    }

    /// How much it is.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Where kernels find it.
    pub fn address(&self) -> Address {
        // The computer's and the GPU's memory have addresses in common.
        self.first.addr() as Address
    }

    /// A number in it that a kernel may be writing to.
    pub fn number(&self, index: usize) -> &AtomicU32 {
        assert!((index + 1) * 4 <= self.bytes);
        // SAFETY: the number lies in the memory, which is aligned to pages, and whoever writes to it writes whole numbers.
        unsafe { AtomicU32::from_ptr(self.first.cast::<u32>().add(index)) }
    }

    /// All of it.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: so many bytes were allocated and written, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.first, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.gpu.enter().is_ok() {
            // SAFETY: it was allocated by the driver, and is freed once.
            let _ = unsafe { result::free_host(self.first.cast::<c_void>()) };
        }
    }
}

/// Memory of the engine's that the GPU copies from by itself.
pub struct Registered {
    gpu: Arc<Gpu>,
    part: SharedBytes,
}

impl Registered {
    /// Takes all pages of a part of memory from the system, for good.
    ///
    /// # Errors
    /// If the system does not allow it.
    pub fn new(gpu: &Arc<Gpu>, part: SharedBytes) -> Result<Registered> {
        let first = part.as_ptr();
        if !part.is_empty() {
            gpu.enter()?;
            // SAFETY: it is memory of this process, and lives until this is dropped.
            unsafe { sys::cuMemHostRegister_v2(first.cast_mut().cast::<c_void>(), part.len(), 0) }
                .result()
                .map_err(|error| failed("pin the memory of expert slots", error))?;
        }
        let end = first.addr() + part.len();
        gpu.pinned.lock().unwrap_or_else(PoisonError::into_inner).insert(first.addr(), end);
        Ok(Registered { gpu: gpu.clone(), part })
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let first = self.part.as_ptr();
        self.gpu.pinned.lock().unwrap_or_else(PoisonError::into_inner).remove(&first.addr());
        if !self.part.is_empty() && self.gpu.enter().is_ok() {
            // SAFETY: it was registered once; copies from it have ended, since those who started them have waited.
            let _ = unsafe { sys::cuMemHostUnregister(first.cast_mut().cast::<c_void>()) };
        }
    }
}

/// A CUDA event: a place among what is started on a stream.
pub struct Event {
    gpu: Arc<Gpu>,
    event: sys::CUevent,
}

// SAFETY: the handle is the driver's, which any thread may use.
unsafe impl Send for Event {}

impl Event {
    /// One that has passed.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Event> {
        gpu.enter()?;
        let event = result::event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING)
            .map_err(|error| failed("be used", error))?;
        Ok(Event { gpu: gpu.clone(), event })
    }

    /// It is when everything that was started so far on a stream has ended.
    pub fn set(&self, stream: Stream) -> Result<()> {
        self.gpu.enter()?;
        // SAFETY: both live.
        unsafe { result::event::record(self.event, self.gpu.handle(stream)) }
            .map_err(|error| failed("compute", error))
    }

    /// What is started on a stream from now on waits for it; the caller does not.
    pub fn hold_up(&self, stream: Stream) -> Result<()> {
        self.gpu.enter()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both live.
        unsafe { result::stream::wait_event(self.gpu.handle(stream), self.event, flags) }
            .map_err(|error| failed("compute", error))
    }

    /// Whether it has passed.
    ///
    /// # Errors
    /// If what it comes after failed.
    pub fn has_passed(&self) -> Result<bool> {
        self.gpu.enter()?;
        // SAFETY: the event lives.
        match unsafe { result::event::query(self.event) } {
            Ok(()) => Ok(true),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => Err(failed("compute", error)),
        }
    }

    /// Waits for it.
    pub fn wait(&self) -> Result<()> {
        self.gpu.enter()?;
        // SAFETY: the event lives.
        unsafe { result::event::synchronize(self.event) }.map_err(|error| failed("compute", error))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.gpu.enter().is_ok() {
            // SAFETY: it was created once and is destroyed once.
            let _ = unsafe { result::event::destroy(self.event) };
        }
    }
}

#[cfg(test)]
mod tests {
    use forebay_testing::{Need, skipped};

    use super::*;

    #[test]
    fn what_pieces_of_one_size_leave_is_for_those_of_another() {
        if let Err(why) = crate::find() {
            return skipped(Need::Gpu, why);
        }
        let gpu = Gpu::open(0, Some(64 << 20)).unwrap();
        let small = 1 << 20;
        let taken: Vec<Address> = std::iter::from_fn(|| gpu.take_piece(small).ok()).collect();
        assert!(taken.len() > 32 && gpu.unused() < 2 * small);
        assert!(matches!(gpu.take_piece(2 * small), Err(Error::Budget { .. })));
        taken.into_iter().for_each(|address| gpu.return_piece(address, small));
        gpu.take_piece(2 * small).unwrap();
    }
}
