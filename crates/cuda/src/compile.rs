//! Compiles the kernels for this machine's GPU when they are first needed, and caches them on disk.

use std::ffi::{CStr, CString};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cudarc::driver::{result, sys};
use cudarc::nvrtc;
use forebay_engine::internals::hash::Fnv;
use forebay_engine::{Error, Result};

use crate::driver::{Gpu, failed};
use crate::{grids, profile};

/// The shared headers.
const HEADS: [(&str, &str); 8] = [
    ("matrix.cuh", include_str!("../kernels/matrix.cuh")),
    ("blocks.cuh", include_str!("../kernels/blocks.cuh")),
    ("planes.cuh", include_str!("../kernels/planes.cuh")),
    ("grids.cuh", include_str!("../kernels/grids.cuh")),
    ("tensor.cuh", include_str!("../kernels/tensor.cuh")),
    ("pages.cuh", include_str!("../kernels/pages.cuh")),
    ("few.cuh", include_str!("../kernels/few.cuh")),
    ("vector.cuh", include_str!("../kernels/vector.cuh")),
];
const SOURCES: [(&str, &str); 12] = [
    ("products", include_str!("../kernels/products.cu")),
    ("gemm", include_str!("../kernels/gemm.cu")),
    ("few", include_str!("../kernels/few.cu")),
    ("one", include_str!("../kernels/one.cu")),
    ("rows", include_str!("../kernels/rows.cu")),
    ("routing", include_str!("../kernels/routing.cu")),
    ("attention", include_str!("../kernels/attention.cu")),
    ("step", include_str!("../kernels/step.cu")),
    ("prompt", include_str!("../kernels/prompt.cu")),
    ("delta", include_str!("../kernels/delta.cu")),
    ("arrange", include_str!("../kernels/arrange.cu")),
    ("best", include_str!("../kernels/best.cu")),
];

/// The first bytes of a cache file.
const MAGIC: &[u8; 8] = b"FBCUBIN\x01";

/// A handle to a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel(pub(crate) sys::CUfunction);

// SAFETY: the handle is the driver's, which any thread may use.
unsafe impl Send for Kernel {}

macro_rules! kernels {
    ($($module:literal: $($name:ident),*;)*) => {
        /// All kernels.
        #[derive(Clone, Copy)]
        #[allow(missing_docs)]
        pub struct Kernels {
            $($(pub $name: Kernel,)*)*
        }

        impl Kernels {
            fn find(modules: &[Module]) -> Result<Kernels> {
                let find = |module: &str, name: &'static str| {
                    let at = SOURCES.iter().position(|(name, _)| *name == module).expect("it is listed");
                    let kernel = modules[at].kernel(name)?;
                    profile::name(kernel.0, name);
                    Ok::<_, Error>(kernel)
                };
                Ok(Kernels { $($($name: find($module, stringify!($name))?,)*)* })
            }
        }
    };
}

kernels! {
    "products": dequantise, matvec, gate_up, down_combine, head_products;
    "gemm": halve, gemm_8, gemm_32, gemm_64, gemm_split_8, gemm_split_32, gemm_split_64;
    "few": few_8, few_16, few_shared_8, few_shared_16, few_gate_up;
    "one": gate_up_one, product_one;
    "rows": rms_norm, layer_norm, add, add_bias, scale, gate, activate_all, activate_rows, add_rows, softcap, weigh_by_best,
        rope_angles, rope, norm_and_rotate, ungroup, pick, copy;
    "routing": route, norm_and_route, norm_and_route_rows, sort, combine;
    "attention": append, attend_halves, attend_singles, merge;
    "step": attend_step, attend_step_128;
    "prompt": attend_prompt_32, attend_prompt_64, attend_prompt_128, attend_prompt_192_128;
    "delta": delta_gates, convolve, delta_norm, recur, delta_chunks, delta_pass;
    "best": best_clear, best_count, best_gather, best_sort;
    "arrange": arrange, fetch, put_rows;
}

/// The kernels and the modules that they belong to.
pub struct Compiled {
    /// Valid as long as this value lives.
    pub kernels: Kernels,
    _modules: Vec<Module>,
}

impl Compiled {
    /// Loads all kernels, and compiles those that are not in the cache. `kinds` has one bit for each kind of weights.
    ///
    /// # Errors
    /// If there is no compiler, or the GPU reports an error.
    pub fn load(gpu: &Arc<Gpu>, cache: Option<&Path>, kinds: u32) -> Result<Compiled> {
        let modules: Vec<Module> = SOURCES
            .iter()
            .map(|(name, text)| Module::load(gpu, name, &source(name, text, kinds), cache))
            .collect::<Result<_>>()?;
        Ok(Compiled { kernels: Kernels::find(&modules)?, _modules: modules })
    }
}

/// A source file with its includes.
fn source(name: &str, text: &str, kinds: u32) -> String {
    // The other sources use no matrices.
    let kinds = if matches!(name, "products" | "gemm" | "few" | "one") { kinds } else { 0 };
    let grids = if kinds == 0 { String::new() } else { grids::source() };
    let mut source = format!("#define KINDS {kinds}u\n{grids}{text}");
    for (head, text) in HEADS {
        source = source.replace(&format!("#include \"{head}\"\n"), text);
    }
    source
}

/// Kernels that were compiled together.
struct Module {
    gpu: Arc<Gpu>,
    module: sys::CUmodule,
}

// SAFETY: the handle is the driver's, which any thread may use.
unsafe impl Send for Module {}

impl Module {
    fn load(gpu: &Arc<Gpu>, name: &str, source: &str, cache: Option<&Path>) -> Result<Module> {
        let (major, minor) = gpu.capability;
        let file = cache.map(|folder| {
            folder.join(format!("{name}-{:016x}-sm_{major}{minor}.cubin", Fnv::of(source.as_bytes())))
        });
        gpu.enter()?;
        // A file that is unreadable, damaged or rejected is compiled again.
        if let Some(module) =
            file.as_deref().and_then(read_cached).and_then(|code| Module::of(gpu, &code).ok())
        {
            return Ok(module);
        }
        let code = compile(name, source, gpu.capability)?;
        if let Some(file) = file {
            write_cached(&file, &code);
        }
        Module::of(gpu, &code)
    }

    fn of(gpu: &Arc<Gpu>, code: &[u8]) -> Result<Module> {
        // SAFETY: the code is a compiler's, or was checked to be what one wrote; the driver checks its form.
        let module = unsafe { result::module::load_data(code.as_ptr().cast()) }
            .map_err(|error| failed("load its kernels", error))?;
        Ok(Module { gpu: gpu.clone(), module })
    }

    fn kernel(&self, name: &str) -> Result<Kernel> {
        let c_name = CString::new(name).expect("names have no zeros");
        // SAFETY: the module is loaded.
        let kernel = unsafe { result::module::get_function(self.module, c_name) }
            .map_err(|error| failed(&format!("find the kernel {name}"), error))?;
        // A block may use all shared memory that the kernel does not use statically.
        let limit = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let own = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
        // SAFETY: the kernel was just found.
        let set = unsafe {
            result::function::get_function_attribute(kernel, own).and_then(|own| {
                result::function::set_function_attribute(kernel, limit, self.gpu.shared_limit as i32 - own)
            })
        };
        set.map_err(|error| failed("set up its kernels", error))?;
        Ok(Kernel(kernel))
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if self.gpu.enter().is_ok() {
            // SAFETY: it was loaded once, and its kernels are dropped with it.
            let _ = unsafe { result::module::unload(self.module) };
        }
    }
}

/// Whether the compiler library exists.
pub fn compiler_is_there() -> bool {
    // SAFETY: looks for the library and loads it, nothing else.
    unsafe { nvrtc::sys::is_culib_present() }
}

/// Compiles a source for one architecture.
fn compile(name: &str, source: &str, (major, minor): (i32, i32)) -> Result<Vec<u8>> {
    if !compiler_is_there() {
        return Err(Error::Backend(
            "the GPU's kernels cannot be compiled: NVRTC, a part of the CUDA toolkit, was not found; install it, or use \
             Options::device = None"
                .into(),
        ));
    }
    let text = CString::new(source).expect("sources have no zeros");
    let file = CString::new(format!("{name}.cu")).expect("names have no zeros");
    let refused = |error: nvrtc::result::NvrtcError| {
        Error::Backend(format!(
            "the GPU's kernels cannot be compiled: {:?}; use Options::device = None to run on the CPU",
            error.0
        ))
    };
    let program = nvrtc::result::create_program(&text, Some(&file)).map_err(refused)?;
    let options = [format!("--gpu-architecture=sm_{major}{minor}"), "--std=c++17".to_owned()];
    // SAFETY: the program was created above and is destroyed below, once.
    let code = unsafe {
        let compiled = nvrtc::result::compile_program(program, &options).map_err(|error| {
            let log = nvrtc::result::get_program_log(program).unwrap_or_default();
            let bytes: Vec<u8> = log.iter().map(|&c| c as u8).collect();
            let log = CStr::from_bytes_until_nul(&bytes).map(CStr::to_string_lossy).unwrap_or_default();
            Error::Backend(format!(
                "the GPU's kernels ({name}) cannot be compiled for sm_{major}{minor}: {:?}: {}; Options::device = None goes \
                 without it",
                error.0,
                log.trim()
            ))
        });
        let code = compiled.and_then(|()| {
            let mut size = 0;
            nvrtc::sys::nvrtcGetCUBINSize(program, &mut size).result().map_err(refused)?;
            let mut code = vec![0u8; size];
            nvrtc::sys::nvrtcGetCUBIN(program, code.as_mut_ptr().cast()).result().map_err(refused)?;
            Ok(code)
        });
        let _ = nvrtc::result::destroy_program(program);
        code?
    };
    Ok(code)
}

/// The contents of a cache file, if it is intact.
fn read_cached(file: &Path) -> Option<Vec<u8>> {
    let bytes = std::fs::read(file).ok()?;
    let (head, code) = bytes.split_at_checked(16)?;
    let (magic, sum) = head.split_at(8);
    (magic == MAGIC && sum == checksum(code)).then(|| code.to_vec())
}

/// Writes a cache file. A failure only costs time at the next start.
fn write_cached(file: &Path, code: &[u8]) {
    let bytes = [&MAGIC[..], &checksum(code), code].concat();
    // Written to a temporary file first, because two programs may start at the same time.
    let beside = file.with_extension(format!("{}.part", std::process::id()));
    let written = file
        .parent()
        .map_or(Ok(()), std::fs::create_dir_all)
        .and_then(|()| std::fs::write(&beside, bytes))
        .and_then(|()| std::fs::rename(&beside, file));
    if written.is_err() {
        let _ = std::fs::remove_file(&beside);
    }
}

fn checksum(code: &[u8]) -> [u8; 8] {
    Fnv::of(code).to_le_bytes()
}

/// The folder for compiled kernels; `None` without a home directory.
pub fn cache_folder() -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")));
    Some(cache.or_else(|| set("LOCALAPPDATA"))?.join("forebay").join("kernels"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_file_of_the_cache_is_not_taken() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("deeper").join("kernels.cubin");
        let code = b"anything".to_vec();
        write_cached(&file, &code);
        assert_eq!(read_cached(&file), Some(code));
        let whole = std::fs::read(&file).unwrap();
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            std::fs::write(&file, &damaged).unwrap();
            assert_eq!(read_cached(&file), None, "byte {at}");
            std::fs::write(&file, &whole[..at]).unwrap();
            assert_eq!(read_cached(&file), None, "cut at {at}");
        }
    }

    /// A kernel that does not wait for its predecessor would sometimes read incomplete data.
    #[test]
    fn every_kernel_waits_for_the_one_before() {
        /// The text from a position to the bracket that closes its first bracket.
        fn body(text: &str) -> &str {
            let mut depth = 0;
            let end = text.char_indices().find(|&(_, c)| {
                depth += i32::from(c == '{') - i32::from(c == '}');
                c == '}' && depth == 0
            });
            &text[..end.expect("brackets are closed").0]
        }
        const WAITS: &str = "await_previous()";
        let mut kernels = 0;
        for (file, text) in SOURCES {
            for (start, _) in text.match_indices("extern \"C\" __global__") {
                let kernel = body(&text[start..]);
                // Some call what does it all.
                let mut called = kernel.split(|c: char| !c.is_alphanumeric() && c != '_');
                let waits = kernel.contains(WAITS)
                    || called.any(|name| {
                        let function = text.find(&format!("inline void {name}("));
                        function.is_some_and(|at| body(&text[at..]).contains(WAITS))
                    });
                assert!(waits, "{file}: {kernel}");
                kernels += 1;
            }
        }
        assert!(kernels > 40, "only {kernels} were found");
    }
}
