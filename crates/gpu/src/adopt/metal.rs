//! Metal: buffers over pages of the process, without a copy.

use std::ptr::NonNull;

use objc2_metal::{MTLDevice, MTLResourceOptions};
use wgpu::hal::api::Metal;

/// Opens an adapter.
///
/// # Errors
/// The driver's.
pub fn open(
    adapter: &wgpu::Adapter,
    features: wgpu::Features,
    limits: &wgpu::Limits,
) -> Result<(wgpu::Device, wgpu::Queue), String> {
    let description = wgpu::DeviceDescriptor {
        label: None,
        required_features: features,
        required_limits: limits.clone(),
        // SAFETY: of these features, products of small matrices are used, and only in shapes that the adapter lists.
        experimental_features: unsafe { wgpu::ExperimentalFeatures::enabled() },
        ..Default::default()
    };
    pollster::block_on(adapter.request_device(&description)).map_err(|e| e.to_string())
}

/// Whether pages can be used in place: on Apple's own processors.
pub fn is_possible(device: &wgpu::Device) -> bool {
    // SAFETY: the handle is only asked for a property.
    let hal = unsafe { device.as_hal::<Metal>() };
    hal.is_some_and(|hal| hal.raw_device().hasUnifiedMemory())
}

/// Bytes that a process should use at most.
pub fn memory(adapter: &wgpu::Adapter) -> u64 {
    // SAFETY: the handle is only asked for a property.
    let hal = unsafe { adapter.as_hal::<Metal>() };
    hal.map_or(0, |hal| hal.raw_device().recommendedMaxWorkingSetSize())
}

/// Makes a buffer over pages.
///
/// # Safety
/// The pages are aligned, belong to the process, and outlive everything that uses the buffer.
pub unsafe fn import(device: &wgpu::Device, pages: *mut u8, bytes: usize) -> Result<wgpu::Buffer, String> {
    // SAFETY: promised by the caller. Nothing tracks hazards of this memory, because the GPU only reads it and the
    // store never writes to a slot that is leased.
    unsafe {
        let hal = device.as_hal::<Metal>().ok_or("it is not a Metal device")?;
        let options = MTLResourceOptions::StorageModeShared | MTLResourceOptions::HazardTrackingModeUntracked;
        let pages = NonNull::new(pages).ok_or("there is no memory")?;
        let raw = hal
            .raw_device()
            .newBufferWithBytesNoCopy_length_options_deallocator(pages.cast(), bytes, options, None)
            .ok_or("Metal refuses it")?;
        drop(hal);
        let raw = wgpu::hal::metal::Device::buffer_from_raw(raw, bytes as u64);
        let description = wgpu::BufferDescriptor {
            label: Some("memory of the process"),
            size: bytes as u64,
            usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC,
            mapped_at_creation: false,
        };
        Ok(device.create_buffer_from_hal::<Metal>(raw, &description))
    }
}
