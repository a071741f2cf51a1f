//! The driver's functions, apart from kernels and graphs.
//!
//! Handles and device addresses are plain 64-bit numbers here, which is how the platform passes them.

use crate::Needs::{Context, Nothing, Queue};
use crate::books::{Node, Space};
use crate::{CURRENT, Driver, call, code, raw};
use sha2::{Digest, Sha256};
use std::ffi::{c_char, c_void};

/// Defines exported functions: `name(parameters) needs |driver| body;`.
macro_rules! export {
    ($($name:ident($($arg:ident: $kind:ty),*) $needs:ident |$driver:ident| $body:expr;)*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $name($($arg: $kind),*) -> u32 {
            call(stringify!($name), concat!(stringify!($name), "@capture"), $needs, |$driver: &mut Driver| $body)
        }
    )*};
}
pub(crate) use export;

/// An answer with nothing to say in the log.
pub(crate) fn quiet() -> Result<String, u32> {
    Ok(String::new())
}

fn known<T>(found: Option<T>) -> Result<T, u32> {
    found.ok_or(code::INVALID_HANDLE)
}

#[unsafe(no_mangle)]
extern "C" fn cuGetErrorName(error: u32, to: *mut *const c_char) -> u32 {
    let name = match error {
        0 => c"CUDA_SUCCESS",
        1 => c"CUDA_ERROR_INVALID_VALUE",
        2 => c"CUDA_ERROR_OUT_OF_MEMORY",
        100 => c"CUDA_ERROR_NO_DEVICE",
        101 => c"CUDA_ERROR_INVALID_DEVICE",
        200 => c"CUDA_ERROR_INVALID_IMAGE",
        201 => c"CUDA_ERROR_INVALID_CONTEXT",
        209 => c"CUDA_ERROR_NO_BINARY_FOR_GPU",
        400 => c"CUDA_ERROR_INVALID_HANDLE",
        500 => c"CUDA_ERROR_NOT_FOUND",
        700 => c"CUDA_ERROR_ILLEGAL_ADDRESS",
        701 => c"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
        719 => c"CUDA_ERROR_LAUNCH_FAILED",
        900 => c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        _ => return code::INVALID_VALUE,
    };
    raw::put(to, name.as_ptr()).err().unwrap_or(0)
}

#[unsafe(no_mangle)]
extern "C" fn cuGetErrorString(_error: u32, to: *mut *const c_char) -> u32 {
    raw::put(to, c"as the script of the fake driver says, or its books do not allow".as_ptr()).err().unwrap_or(0)
}

export! {
    cuInit(_flags: u32) Nothing |driver| match driver.script.devices {
        0 => Err(100),
        _ => quiet(),
    };
    cuDriverGetVersion(to: *mut i32) Nothing |driver| raw::put(to, driver.script.driver).and_then(|()| quiet());
    cuDeviceGetCount(to: *mut i32) Nothing |driver| raw::put(to, driver.script.devices).and_then(|()| quiet());
    cuDeviceGet(to: *mut i32, ordinal: i32) Nothing |driver| match (0..driver.script.devices).contains(&ordinal) {
        true => raw::put(to, ordinal).and_then(|()| quiet()),
        false => Err(code::INVALID_DEVICE),
    };
    cuDeviceGetName(to: *mut c_char, room: i32, _device: i32) Nothing |driver| {
        let bytes: Vec<u8> = driver.script.name.bytes().take(room.max(1) as usize - 1).chain([0]).collect();
        for (index, byte) in bytes.into_iter().enumerate() {
            raw::put(to.wrapping_add(index), byte as c_char)?;
        }
        quiet()
    };
    cuDeviceTotalMem_v2(to: *mut usize, _device: i32) Nothing |driver| {
        raw::put(to, driver.script.total_bytes as usize).and_then(|()| quiet())
    };
    cuDeviceGetAttribute(to: *mut i32, which: u32, _device: i32) Nothing |driver| {
        let value = match which {
            16 => 132,
            75 => driver.script.capability.0,
            76 => driver.script.capability.1,
            97 => 227 << 10,
            _ => return Err(code::INVALID_VALUE),
        };
        raw::put(to, value).and_then(|()| quiet())
    };
    cuDevicePrimaryCtxRetain(to: *mut u64, _device: i32) Nothing |driver| {
        driver.books.contexts += 1;
        raw::put(to, 1).and_then(|()| quiet())
    };
    cuDevicePrimaryCtxRelease_v2(_device: i32) Nothing |driver| {
        driver.books.contexts = driver.books.contexts.checked_sub(1).ok_or(code::INVALID_CONTEXT)?;
        Ok(format!("live={}", driver.books.live()))
    };
    cuCtxSetCurrent(context: u64) Nothing |driver| {
        if context != 1 || driver.books.contexts == 0 {
            return Err(code::INVALID_CONTEXT);
        }
        CURRENT.set(true);
        quiet()
    };

    cuMemGetInfo_v2(free: *mut usize, total: *mut usize) Context |driver| {
        raw::put(free, driver.script.free_bytes.saturating_sub(driver.books.device_bytes()) as usize)?;
        raw::put(total, driver.script.total_bytes as usize).and_then(|()| quiet())
    };
    cuMemAlloc_v2(to: *mut u64, bytes: usize) Context |driver| {
        if bytes as u64 > driver.script.free_bytes.saturating_sub(driver.books.device_bytes()) {
            return Err(code::OUT_OF_MEMORY);
        }
        let address = driver.books.allocate(Space::Device, bytes)?;
        raw::put(to, address)?;
        Ok(format!("bytes={bytes}"))
    };
    cuMemFree_v2(address: u64) Context |driver| driver.books.free(Space::Device, address).and_then(|()| quiet());
    cuMemHostAlloc(to: *mut u64, bytes: usize, _flags: u32) Context |driver| {
        let address = driver.books.allocate(Space::Pinned, bytes)?;
        raw::put(to, address)?;
        Ok(format!("bytes={bytes}"))
    };
    cuMemFreeHost(address: u64) Context |driver| driver.books.free(Space::Pinned, address).and_then(|()| quiet());

    cuMemcpyHtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: u64) Context |driver| {
        known(driver.books.streams.get(&stream))?;
        driver.books.copy((Space::Device, to), (Space::Pinned, from), bytes as u64)?;
        Ok(format!("bytes={bytes}"))
    };
    cuMemcpyDtoHAsync_v2(to: u64, from: u64, bytes: usize, stream: u64) Context |driver| {
        known(driver.books.streams.get(&stream))?;
        driver.books.copy((Space::Pinned, to), (Space::Device, from), bytes as u64)?;
        Ok(format!("bytes={bytes}"))
    };
    cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: u64) Queue |driver| {
        let node = Node::Copy { to, from, bytes: bytes as u64 };
        if !driver.books.record(stream, &node)? {
            driver.books.run(&node)?;
        }
        Ok(format!("bytes={bytes}"))
    };
    cuMemsetD32Async(to: u64, word: u32, words: usize, stream: u64) Queue |driver| {
        let node = Node::Fill { to, word, words: words as u64 };
        if !driver.books.record(stream, &node)? {
            driver.books.run(&node)?;
        }
        Ok(format!("words={words}"))
    };
    cuMemcpy2DAsync_v2(copy: *const Copy2d, stream: u64) Context |driver| {
        known(driver.books.streams.get(&stream))?;
        let copy = raw::get(copy, 0)?;
        let plain = [copy.source_x, copy.source_y, copy.target_x, copy.target_y] == [0; 4];
        if !plain || (copy.source_kind, copy.target_kind) != (1, 2) || copy.width > copy.source_pitch.min(copy.target_pitch) {
            return Err(code::INVALID_VALUE);
        }
        for row in 0..copy.rows {
            let (to, from) = (copy.target_device + (row * copy.target_pitch) as u64, copy.source_host + (row * copy.source_pitch) as u64);
            driver.books.copy((Space::Device, to), (Space::Pinned, from), copy.width as u64)?;
        }
        Ok(format!("width={} rows={}", copy.width, copy.rows))
    };

    cuStreamCreate(to: *mut u64, _flags: u32) Context |driver| {
        let handle = driver.books.handle();
        driver.books.streams.insert(handle, None);
        raw::put(to, handle).and_then(|()| quiet())
    };
    cuStreamDestroy_v2(stream: u64) Context |driver| known(driver.books.streams.remove(&stream)).and_then(|_| quiet());
    cuEventCreate(to: *mut u64, _flags: u32) Context |driver| {
        let handle = driver.books.handle();
        driver.books.events.insert(handle);
        raw::put(to, handle).and_then(|()| quiet())
    };
    cuEventRecord(event: u64, stream: u64) Context |driver| {
        known(driver.books.events.get(&event))?;
        known(driver.books.streams.get(&stream))?;
        Ok(format!("event={event:x}"))
    };
    cuEventSynchronize(event: u64) Context |driver| {
        known(driver.books.events.get(&event))?;
        Ok(format!("event={event:x}"))
    };
    cuEventDestroy_v2(event: u64) Context |driver| known(driver.books.events.take(&event)).and_then(|_| quiet());

    cuModuleLoadData(to: *mut u64, image: *const c_void) Context |driver| {
        let image = image_bytes(image.cast())?;
        let cubin = oxide_bundle::cubin::inspect(&image).map_err(|_| code::INVALID_IMAGE)?;
        let (major, minor) = driver.script.capability;
        if cubin.sm as i32 != 10 * major + minor {
            return Err(code::NO_BINARY_FOR_GPU);
        }
        let sha256: String = Sha256::digest(&image).iter().map(|byte| format!("{byte:02x}")).collect();
        let handle = driver.books.handle();
        driver.books.modules.insert(handle, crate::books::Module { sha256: sha256.clone(), kernels: cubin.kernels });
        raw::put(to, handle)?;
        Ok(format!("sha256={sha256}"))
    };
    cuModuleUnload(module: u64) Context |driver| known(driver.books.modules.remove(&module)).and_then(|_| quiet());
}

/// `CUDA_MEMCPY2D`.
#[derive(Copy, Clone)]
#[repr(C)]
struct Copy2d {
    source_x: usize,
    source_y: usize,
    source_kind: u32,
    source_host: u64,
    source_device: u64,
    source_array: u64,
    source_pitch: usize,
    target_x: usize,
    target_y: usize,
    target_kind: u32,
    target_host: u64,
    target_device: u64,
    target_array: u64,
    target_pitch: usize,
    width: usize,
    rows: usize,
}

/// The bytes of an ELF64 image, whose size only its own headers say.
fn image_bytes(image: *const u8) -> Result<Vec<u8>, u32> {
    let header = raw::list(image, 64)?;
    if header[..5] != *b"\x7fELF\x02" {
        return Err(code::INVALID_IMAGE);
    }
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0_u64, |value, byte| value << 8 | u64::from(*byte)) as usize;
    let table = |at: usize, size: usize, count: usize| {
        number(&header[at..at + 8]) + number(&header[size..size + 2]) * number(&header[count..count + 2])
    };
    let (sections, size, count) = (number(&header[40..48]), number(&header[58..60]), number(&header[60..62]));
    let mut end = table(32, 54, 56).max(table(40, 58, 60));
    for index in 0..count {
        let row = raw::list(image.wrapping_add(sections + index * size), 64)?;
        // Type 8 has a size and no bytes in the file.
        if number(&row[4..8]) != 8 {
            end = end.max(number(&row[24..32]) + number(&row[32..40]));
        }
    }
    raw::list(image, end)
}
