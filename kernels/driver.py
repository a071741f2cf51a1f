"""The CUDA driver API over ctypes: as much as checking and timing kernels needs. No other package."""

import ctypes
from ctypes import POINTER, Structure, Union, byref, c_char, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p

_MAX_DYNAMIC_SHARED, _NON_PORTABLE_CLUSTER = 8, 14
_CLUSTER, _COOPERATIVE, _PDL = 4, 2, 6
_CAPTURE_RELAXED = 2


class _Value(Union):
    _fields_ = [("words", c_uint * 16), ("flag", c_int)]


class _Attribute(Structure):
    _fields_ = [("id", c_int), ("pad", c_int), ("value", _Value)]


class _Config(Structure):
    _fields_ = [("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint), ("stream", c_void_p),
                ("attributes", POINTER(_Attribute)), ("count", c_uint)]


class DriverError(RuntimeError):
    """A driver call failed."""


class Driver:
    """A primary context on device 0, one stream, and what lives in them."""

    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        device = c_int()
        self.call("cuDeviceGet", byref(device), 0)
        context, stream = c_void_p(), c_void_p()
        self.call("cuDevicePrimaryCtxRetain", byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.call("cuStreamCreate", byref(stream), 1)
        self.device, self.stream = device, stream

    def call(self, name, *arguments):
        """Calls and raises on failure."""
        status = getattr(self.cuda, name)(*arguments)
        if status:
            text = c_char_p()
            self.cuda.cuGetErrorName(status, byref(text))
            raise DriverError(f"{name}: {(text.value or b'?').decode()}")

    def identity(self):
        """Name of the device and version of the driver."""
        name, version = (c_char * 128)(), c_int()
        self.call("cuDeviceGetName", name, 128, self.device)
        self.call("cuDriverGetVersion", byref(version))
        return {"device": name.value.decode(), "driver_api": version.value}

    # ---- memory ----

    def allocate(self, size):
        """A device address."""
        address = c_uint64()
        self.call("cuMemAlloc_v2", byref(address), c_size_t(max(size, 256)))
        return address.value

    def free(self, address):
        """Returns memory."""
        self.call("cuMemFree_v2", c_uint64(address))

    def fill(self, address, byte, size):
        """Sets bytes."""
        self.call("cuMemsetD8_v2", c_uint64(address), c_uint(byte), c_size_t(size))

    def write(self, address, array):
        """Host to device."""
        self.call("cuMemcpyHtoD_v2", c_uint64(address), array.ctypes.data_as(c_void_p), c_size_t(array.nbytes))

    def read(self, address, array):
        """Device to host, into `array`."""
        self.call("cuMemcpyDtoH_v2", array.ctypes.data_as(c_void_p), c_uint64(address), c_size_t(array.nbytes))
        return array

    def copy(self, to, source, size):
        """Device to device."""
        self.call("cuMemcpyDtoD_v2", c_uint64(to), c_uint64(source), c_size_t(size))

    def synchronize(self):
        """Waits for everything."""
        self.call("cuCtxSynchronize")

    # ---- code ----

    def load(self, data, symbol, shared_bytes, cluster):
        """A function of a cubin, ready to launch."""
        module, function = c_void_p(), c_void_p()
        self.call("cuModuleLoadData", byref(module), data)
        self.call("cuModuleGetFunction", byref(function), module, symbol.encode())
        if shared_bytes > 48 << 10:
            self.call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, c_int(shared_bytes))
        if cluster != [1, 1, 1]:
            self.call("cuFuncSetAttribute", function, _NON_PORTABLE_CLUSTER, c_int(1))
        return function

    def parameter(self, function, index):
        """Offset and size of a parameter as the driver sees it."""
        offset, size = c_size_t(), c_size_t()
        self.call("cuFuncGetParamInfo", function, c_size_t(index), byref(offset), byref(size))
        return offset.value, size.value

    def tensor_map(self, address, dtype, dims, strides, box, element_strides, interleave, swizzle, l2_promotion, oob_fill):
        """128 bytes in an aligned buffer; keep the result alive."""
        rank = len(dims)
        raw = ctypes.create_string_buffer(128 + 64)
        base = (ctypes.addressof(raw) + 63) // 64 * 64
        array = lambda kind, values: (kind * max(len(values), 1))(*values)
        self.call("cuTensorMapEncodeTiled", c_void_p(base), c_int(dtype), c_uint32(rank), c_void_p(address), array(c_uint64, dims),
                  array(c_uint64, strides), array(c_uint32, box), array(c_uint32, element_strides), c_int(interleave),
                  c_int(swizzle), c_int(l2_promotion), c_int(oob_fill))
        return raw, base

    def launch(self, function, grid, block, shared, cluster, pdl, cooperative, pointers):
        """Launches on the stream; `pointers` are host addresses of the parameters."""
        attributes = (_Attribute * 3)()
        count = 0
        if cluster != [1, 1, 1]:
            attributes[count].id = _CLUSTER
            attributes[count].value.words[0:3] = cluster
            count += 1
        for wanted, identifier in ((pdl, _PDL), (cooperative, _COOPERATIVE)):
            if wanted:
                attributes[count].id = identifier
                attributes[count].value.flag = 1
                count += 1
        config = _Config((c_uint * 3)(*grid), (c_uint * 3)(*block), shared, self.stream, attributes, count)
        parameters = (c_void_p * len(pointers))(*pointers)
        self.call("cuLaunchKernelEx", byref(config), function, parameters, None)

    # ---- graphs and time ----

    def graph(self, record):
        """An executable graph of the launches that `record()` makes."""
        graph, executable = c_void_p(), c_void_p()
        self.call("cuStreamBeginCapture_v2", self.stream, _CAPTURE_RELAXED)
        try:
            record()
        finally:
            self.call("cuStreamEndCapture", self.stream, byref(graph))
        self.call("cuGraphInstantiateWithFlags", byref(executable), graph, c_uint64(0))
        self.call("cuGraphDestroy", graph)
        return executable

    def replay(self, executable):
        """Launches a graph on the stream."""
        self.call("cuGraphLaunch", executable, self.stream)

    def destroy(self, executable):
        """Frees a graph."""
        self.call("cuGraphExecDestroy", executable)

    def microseconds(self, work):
        """Device time of what `work()` enqueues."""
        events = [c_void_p(), c_void_p()]
        for event in events:
            self.call("cuEventCreate", byref(event), 0)
        self.call("cuEventRecord", events[0], self.stream)
        work()
        self.call("cuEventRecord", events[1], self.stream)
        self.call("cuEventSynchronize", events[1])
        elapsed = c_float()
        self.call("cuEventElapsedTime", byref(elapsed), *events)
        for event in events:
            self.call("cuEventDestroy_v2", event)
        return elapsed.value * 1000
