//! Vulkan: the extension VK_EXT_external_memory_host imports pages of the process.

use std::ffi::CStr;

use ash::vk;
use wgpu::hal::api::Vulkan;

const EXTENSION: &CStr = c"VK_EXT_external_memory_host";

/// Opens an adapter, with the extension if it has that.
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
    // SAFETY: the handle is used as wgpu would use it, with one extension more, which the adapter has; the device is
    // described as it was opened.
    unsafe {
        let Some(hal) = adapter.as_hal::<Vulkan>() else { return Err("it is not a Vulkan device".into()) };
        let imports = hal.physical_device_capabilities().supports_extension(EXTENSION);
        let callback: Box<wgpu::hal::vulkan::CreateDeviceCallback<'_>> = Box::new(move |args| {
            if imports && !args.extensions.contains(&EXTENSION) {
                args.extensions.push(EXTENSION);
            }
        });
        let hints = wgpu::MemoryHints::Performance;
        let opened =
            hal.open_with_callback(features, limits, &hints, Some(callback)).map_err(|e| e.to_string())?;
        drop(hal);
        adapter.create_device_from_hal(opened, &description).map_err(|e| e.to_string())
    }
}

/// Whether pages can be imported.
pub fn is_possible(device: &wgpu::Device) -> bool {
    // SAFETY: the handle is only asked for its extensions.
    let hal = unsafe { device.as_hal::<Vulkan>() };
    hal.is_some_and(|hal| hal.enabled_device_extensions().contains(&EXTENSION))
}

/// Bytes of the largest heap of the device's own memory.
pub fn memory(adapter: &wgpu::Adapter) -> u64 {
    // SAFETY: the handles are only asked for properties.
    unsafe {
        let Some(hal) = adapter.as_hal::<Vulkan>() else { return 0 };
        let instance = hal.shared_instance().raw_instance();
        let properties = instance.get_physical_device_memory_properties(hal.raw_physical_device());
        let heaps = &properties.memory_heaps[..properties.memory_heap_count as usize];
        let local = heaps.iter().filter(|heap| heap.flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL));
        local.map(|heap| heap.size).max().unwrap_or(0)
    }
}

/// Imports pages as a buffer.
///
/// # Safety
/// The pages are aligned, belong to the process, and outlive everything that uses the buffer.
pub unsafe fn import(device: &wgpu::Device, pages: *mut u8, bytes: usize) -> Result<wgpu::Buffer, String> {
    let describe = |error: vk::Result| error.to_string();
    let size = bytes as u64;
    // SAFETY: the calls follow the extension's rules: the handle type is the same in all of them, the pointer and the
    // size are aligned, and the memory type is one that both the buffer and the pages allow. What was made before a
    // failure is destroyed.
    unsafe {
        let hal = device.as_hal::<Vulkan>().ok_or("it is not a Vulkan device")?;
        let vulkan = hal.raw_device();
        let kind = vk::ExternalMemoryHandleTypeFlags::HOST_ALLOCATION_EXT;
        let host = ash::ext::external_memory_host::Device::new(hal.shared_instance().raw_instance(), vulkan);
        let mut allowed = vk::MemoryHostPointerPropertiesEXT::default();
        (host.fp().get_memory_host_pointer_properties_ext)(vulkan.handle(), kind, pages.cast(), &mut allowed)
            .result()
            .map_err(describe)?;
        let mut external = vk::ExternalMemoryBufferCreateInfo::default().handle_types(kind);
        let usage = vk::BufferUsageFlags::STORAGE_BUFFER | vk::BufferUsageFlags::TRANSFER_SRC;
        let create = vk::BufferCreateInfo::default().size(size).usage(usage).push_next(&mut external);
        let buffer = vulkan.create_buffer(&create, None).map_err(describe)?;
        let needs = vulkan.get_buffer_memory_requirements(buffer);
        let types = needs.memory_type_bits & allowed.memory_type_bits;
        if types == 0 || needs.size > size {
            vulkan.destroy_buffer(buffer, None);
            return Err("no memory type allows it".into());
        }
        let mut import =
            vk::ImportMemoryHostPointerInfoEXT::default().handle_type(kind).host_pointer(pages.cast());
        let allocate = vk::MemoryAllocateInfo::default()
            .allocation_size(size)
            .memory_type_index(types.trailing_zeros())
            .push_next(&mut import);
        let memory = match vulkan.allocate_memory(&allocate, None) {
            Ok(memory) => memory,
            Err(error) => {
                vulkan.destroy_buffer(buffer, None);
                return Err(describe(error));
            }
        };
        if let Err(error) = vulkan.bind_buffer_memory(buffer, memory, 0) {
            vulkan.destroy_buffer(buffer, None);
            vulkan.free_memory(memory, None);
            return Err(describe(error));
        }
        let raw = wgpu::hal::vulkan::Buffer::from_raw_managed(buffer, memory, 0, size);
        let description = wgpu::BufferDescriptor {
            label: Some("memory of the process"),
            size,
            usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC,
            mapped_at_creation: false,
        };
        Ok(device.create_buffer_from_hal::<Vulkan>(raw, &description))
    }
}
