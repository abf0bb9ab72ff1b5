/* Stands in for what autograd asks of a CUDA driver where there is none: which devices hold a context. None does.

   torch counts no devices until it is told of one: its guard for fake tensors is only set up where there are none. */

static signed char devices = 0;

void pretend_device(void) { devices = 64; } /* as many as that guard has */

signed char _ZN3c104cuda12device_countEv(void) { return devices; } /* c10::cuda::device_count() */

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    (void)device;
    *flags = 0;
    *active = 0;
    return 0;
}
