//! One GPU: its context, its streams and its memory.

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

/// Pieces of states are allocated in slabs of this size.
const SLAB: u64 = 8 << 20;

/// A GPU in use.
pub struct Gpu {
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    copies: sys::CUstream,
    /// A stream on which graphs are recorded and nothing runs. Otherwise work of other threads would become part of a
    /// graph.
    recording: sys::CUstream,
    /// Its product name.
    pub name: String,
    /// Compute capability, major and minor.
    pub capability: (i32, i32),
    /// The number of multiprocessors.
    pub multiprocessors: u32,
    /// The most shared memory that a block may use.
    pub shared_limit: u32,
    /// Bytes that models may use.
    pub budget: u64,
    /// Bytes in use, by purpose.
    used: Mutex<BTreeMap<&'static str, u64>>,
    pieces: Mutex<PiecePool>,
    /// Regions of pinned RAM, from which the GPU copies on its own: start and end.
    pinned: Mutex<BTreeMap<usize, usize>>,
}

/// A CUDA stream. Work on one stream runs in order, and independently of the other stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// For everything else.
    Compute,
    /// For uploads of experts.
    Copies,
}

/// Memory of freed states, kept for later ones.
#[derive(Default)]
struct PiecePool {
    /// Free pieces, by size.
    free: HashMap<u64, Vec<Address>>,
    slabs: Vec<Slab>,
}

/// Pieces that were allocated together.
struct Slab {
    first: Address,
    /// Bytes of the slab.
    bytes: u64,
    /// Bytes of each piece, and how many are free.
    piece: u64,
    count: u64,
}

// SAFETY: the handles are the driver's, which any thread may use; what they refer to does not change after creation.
unsafe impl Send for Gpu {}
// SAFETY: as above; what does change is behind a mutex or atomic.
unsafe impl Sync for Gpu {}

/// What the driver reports about a GPU that is not in use.
#[derive(Clone, Debug)]
pub struct Found {
    /// Its number.
    pub ordinal: usize,
    /// Its product name.
    pub name: String,
    /// Bytes of memory.
    pub memory: u64,
    /// Major and minor compute capability.
    pub capability: (i32, i32),
    /// Its PCI address in the system's notation: `0000:3b:00.0`.
    pub bus: String,
}

/// The GPUs of this machine.
///
/// # Errors
/// Why no GPU can be used, as a message.
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

/// The driver's message for an error.
fn reason(error: DriverError) -> String {
    let name = error.error_name().map(|name| name.to_string_lossy().into_owned());
    let text = error.error_string().map(|text| text.to_string_lossy().into_owned());
    match (name, text) {
        (Ok(name), Ok(text)) => format!("{text} ({name})"),
        _ => format!("error {:?}", error.0),
    }
}

/// The free bytes of the GPU's memory, less a reserve for other programs.
fn usable_memory() -> std::result::Result<u64, DriverError> {
    let free = result::mem_get_info()?.0 as u64;
    Ok(free.saturating_sub((free / 32).max(256 << 20)))
}

/// Converts the driver's error to the engine's.
pub fn failed(doing: &str, error: DriverError) -> Error {
    let message =
        format!("the GPU cannot {doing}: {}; use Options::device = None to run on the CPU", reason(error));
    if is_fatal(error.0) { Error::DeviceLost(message) } else { Error::Backend(message) }
}

/// Whether everything fails from now on: the driver gives up a context in which a kernel failed, and a card may be
/// gone.
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
    /// Opens the GPU with this number, with `budget` bytes of its memory; by default all free memory less a margin.
    ///
    /// # Errors
    /// If the driver reports an error.
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

    /// Whether a kernel may start while its predecessor ends, including in graphs. This needs compute capability 9.0
    /// and a driver for CUDA 12.3.
    pub fn overlaps(&self) -> bool {
        let mut version = 0;
        // SAFETY: the driver writes one number.
        let asked = unsafe { sys::cuDriverGetVersion(&raw mut version) }.result();
        self.capability >= (9, 0) && asked.is_ok() && version >= 12_030
    }

    /// Makes this GPU's context current on the calling thread.
    pub fn enter(&self) -> Result<()> {
        // SAFETY: the context lives as long as the GPU.
        unsafe { result::ctx::set_current(self.context) }.map_err(|error| failed("be used", error))
    }

    /// The stream for everything except uploads of experts.
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

    /// Waits until all started work has ended, except uploads of experts.
    ///
    /// # Errors
    /// If any of the work failed.
    pub fn wait(&self) -> Result<()> {
        self.wait_for(Stream::Compute)
    }

    /// Waits until all work on a stream has ended.
    ///
    /// # Errors
    /// If any of the work failed.
    pub fn wait_for(&self, stream: Stream) -> Result<()> {
        self.enter()?;
        // SAFETY: the stream lives as long as the GPU.
        unsafe { result::stream::synchronize(self.handle(stream)) }.map_err(|error| failed("compute", error))
    }

    /// Allocates memory for the purpose `what`.
    ///
    /// # Errors
    /// If there is not enough memory, or the budget does not allow it.
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

    /// Bytes of the budget that are not in use.
    pub fn unused(&self) -> u64 {
        self.budget.saturating_sub(self.counts().values().sum())
    }

    /// Checks that other programs have left this many bytes free.
    ///
    /// # Errors
    /// If they have not.
    pub fn has_free(&self, bytes: u64) -> Result<()> {
        self.enter()?;
        let (free, _) = result::mem_get_info().map_err(|error| failed("report its free memory", error))?;
        if free as u64 >= bytes {
            return Ok(());
        }
        let (free, bytes) = (Bytes(free as u64), Bytes(bytes));
        Err(Error::Backend(format!(
            "the GPU has {free} of free memory, but {bytes} are needed: other programs use its memory"
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
        // SAFETY: the address is freed once, by its owner.
        let address = unsafe { result::malloc_sync((bytes as usize).max(16)) }
            .map_err(|error| match error.0 {
                sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => Error::Backend(format!(
                    "the GPU is out of memory: {} for {what} are not free; end other programs that use it, lower the device's memory limit, \
                     or use Options::device = None",
                    Bytes(bytes)
                )),
                _ => failed(&format!("allocate {} for {what}", Bytes(bytes)), error),
            })?;
        *counts.entry(what).or_default() += bytes;
        Ok(address)
    }

    fn free(&self, address: Address, bytes: u64, what: &'static str) {
        if self.enter().is_ok() {
            // SAFETY: the address was allocated by `take`, and is no longer in use. A lost device has no
            // memory to free.
            let _ = unsafe { result::free_sync(address) };
        }
        *self.counts().entry(what).or_default() -= bytes;
    }

    /// A piece of memory for a state, with arbitrary content.
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
                // Slabs of other sizes may have free pieces.
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

    /// Returns a piece for later states. Work that was started with it ends before later work begins.
    pub(crate) fn return_piece(&self, address: Address, bytes: u64) {
        let mut pool = self.pieces.lock().unwrap_or_else(PoisonError::into_inner);
        pool.free.entry(bytes).or_default().push(address);
    }

    /// Frees slabs of which no state has a piece.
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

    /// Copies bytes to the GPU, after all started work, and waits.
    pub fn write(&self, to: Address, bytes: &[u8]) -> Result<()> {
        self.enter()?;
        // SAFETY: the caller owns the memory there, and the bytes live until the wait below is over.
        unsafe { result::memcpy_htod_async(to, bytes, self.stream) }
            .map_err(|e| failed("receive data", e))?;
        self.wait()
    }

    /// Copies bytes to the GPU on the stream for uploads, without waiting.
    ///
    /// # Safety
    /// The bytes must not change, and the target must stay allocated, until the copy has ended.
    pub unsafe fn upload(&self, to: Address, bytes: &[u8]) -> Result<()> {
        self.enter()?;
        // SAFETY: the caller's promise.
        unsafe { result::memcpy_htod_async(to, bytes, self.copies) }.map_err(|e| failed("receive experts", e))
    }

    /// Whether the bytes are in pinned memory.
    pub fn is_pinned(&self, bytes: &[u8]) -> bool {
        let (first, end) = (bytes.as_ptr().addr(), bytes.as_ptr().addr() + bytes.len());
        let pinned = self.pinned.lock().unwrap_or_else(PoisonError::into_inner);
        pinned.range(..=first).next_back().is_some_and(|(_, &pinned)| end <= pinned)
    }

    /// Copies bytes from the GPU, after all started work, and waits.
    pub fn read(&self, from: Address, bytes: &mut [u8]) -> Result<()> {
        self.enter()?;
        // SAFETY: the caller owns the memory there, and the bytes live until the wait below is over.
        unsafe { result::memcpy_dtoh_async(bytes, from, self.stream) }.map_err(|e| failed("compute", e))?;
        self.wait()
    }

    /// Starts a copy to the GPU, after all started work. The bytes must live until it has ended.
    pub fn send(&self, to: Address, bytes: &[u8]) -> Result<()> {
        self.enter()?;
        // SAFETY: the caller owns the memory there, and waits before the bytes go.
        unsafe { result::memcpy_htod_async(to, bytes, self.stream) }.map_err(|e| failed("receive data", e))
    }

    /// Copies bytes within the GPU, after all started work.
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
            // SAFETY: no piece of it is in use any more, because pieces keep the GPU alive.
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

/// Memory of the GPU. Dropping it frees the memory.
pub struct Memory {
    gpu: Arc<Gpu>,
    address: Address,
    bytes: usize,
    what: &'static str,
}

impl Memory {
    /// Its address.
    pub fn address(&self) -> Address {
        self.address
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.gpu.free(self.address, self.bytes as u64, self.what);
    }
}

/// Pinned memory, from which the GPU copies on its own.
pub struct Pinned {
    gpu: Arc<Gpu>,
    first: *mut u8,
    bytes: usize,
}

// SAFETY: it is owned memory like a vector's.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Allocates this many bytes.
    ///
    /// # Errors
    /// If the system has no such memory.
    pub fn new(gpu: &Arc<Gpu>, bytes: usize) -> Result<Pinned> {
        gpu.enter()?;
        // SAFETY: freed once, when dropped.
        let first = unsafe { result::malloc_host(bytes, sys::CU_MEMHOSTALLOC_DEVICEMAP) }
            .map_err(|e| failed("pin memory", e))?
            .cast::<u8>();
        // SAFETY: this many bytes were allocated.
        unsafe { first.write_bytes(0, bytes) };
        Ok(Pinned { gpu: gpu.clone(), first, bytes })
    }

    /// Its size.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Its address for kernels.
    pub fn address(&self) -> Address {
        // RAM and GPU memory share one address space.
        self.first.addr() as Address
    }

    /// A number that a kernel may be writing to.
    pub fn number(&self, index: usize) -> &AtomicU32 {
        assert!((index + 1) * 4 <= self.bytes);
        // SAFETY: the number lies in the memory, which is aligned to pages, and writers write whole numbers.
        unsafe { AtomicU32::from_ptr(self.first.cast::<u32>().add(index)) }
    }

    /// All of its bytes.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: this many bytes were allocated and written, and the borrow is exclusive.
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

/// A region of the engine's memory that is pinned while this lives.
pub struct Registered {
    gpu: Arc<Gpu>,
    part: SharedBytes,
}

impl Registered {
    /// Pins a region of memory, which makes all its pages resident.
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

/// A CUDA event: a point in a stream.
pub struct Event {
    gpu: Arc<Gpu>,
    event: sys::CUevent,
}

// SAFETY: the handle is the driver's, which any thread may use.
unsafe impl Send for Event {}

impl Event {
    /// A new event, which counts as passed.
    ///
    /// # Errors
    /// If the driver reports an error.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Event> {
        gpu.enter()?;
        let event = result::event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING)
            .map_err(|error| failed("be used", error))?;
        Ok(Event { gpu: gpu.clone(), event })
    }

    /// Sets the event to the current end of a stream.
    pub fn set(&self, stream: Stream) -> Result<()> {
        self.gpu.enter()?;
        // SAFETY: both live.
        unsafe { result::event::record(self.event, self.gpu.handle(stream)) }
            .map_err(|error| failed("compute", error))
    }

    /// Makes later work on a stream wait for the event. The caller does not wait.
    pub fn block(&self, stream: Stream) -> Result<()> {
        self.gpu.enter()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both live.
        unsafe { result::stream::wait_event(self.gpu.handle(stream), self.event, flags) }
            .map_err(|error| failed("compute", error))
    }

    /// Whether the event has passed.
    ///
    /// # Errors
    /// If the work before it failed.
    pub fn has_passed(&self) -> Result<bool> {
        self.gpu.enter()?;
        // SAFETY: the event lives.
        match unsafe { result::event::query(self.event) } {
            Ok(()) => Ok(true),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => Err(failed("compute", error)),
        }
    }

    /// Waits until the event has passed.
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
