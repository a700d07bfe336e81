/* From the end of boot.S to the kernel's own kmain. */
#include "lib.h"

void boot_c(u32 multiboot_info);
void boot_c(u32 multiboot_info)
{
    traps_setup();
    cpu_setup(0);
    console_setup();
    cmdline_setup(multiboot_info);
    apic_setup();
    time_setup();
    kmain();
    power_off();
}
