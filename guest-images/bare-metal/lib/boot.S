/*
 * From the multiboot entry (32-bit protected mode, paging off, EBX = info structure) to C in long mode.
 * Maps the first 4 GiB one to one with 2 MiB pages that CPL3 may use too: these guests protect nothing from themselves.
 */
#include "layout.h"

#define MB_MAGIC 0x1BADB002
#define MB_FLAGS 0x00010003 /* page-aligned modules, memory information, address fields valid */

    .section .multiboot, "a"
    .p2align 2
multiboot_header:
    .long MB_MAGIC, MB_FLAGS, -(MB_MAGIC + MB_FLAGS)
    .long multiboot_header, image_start, image_end, bss_end, start32

    .section .boot32, "ax"
    .code32
    .globl start32
start32:
    cli
    cld
    mov $boot_stack_top, %esp
    mov %ebx, multiboot_info
    /* Four page directories of 512 entries, 2 MiB each: present, writable, user, large. */
    mov $page_dirs, %edi
    mov $0x87, %eax
    mov $2048, %ecx
1:  mov %eax, (%edi)
    add $8, %edi
    add $0x200000, %eax
    loop 1b
    mov $pdpt, %edi
    mov $page_dirs + 7, %eax
    mov $4, %ecx
2:  mov %eax, (%edi)
    add $8, %edi
    add $4096, %eax
    loop 2b
    movl $pdpt + 7, pml4
    call enter_long_mode
    ljmp $SEL_KERNEL_CS, $start64

/* Shared with the other CPUs' start: page tables on, long mode active, still in a 32-bit segment. */
    .globl enter_long_mode
enter_long_mode:
    mov $pml4, %eax
    mov %eax, %cr3
    mov $0x20, %eax         /* CR4.PAE */
    mov %eax, %cr4
    mov $0xC0000080, %ecx   /* EFER */
    rdmsr
    or $0x101, %eax         /* LME, SCE */
    wrmsr
    mov $0x80010031, %eax   /* CR0: PG, WP, NE, ET, PE */
    mov %eax, %cr0
    lgdt gdt_pointer
    ret

    .globl start32_ap
start32_ap:
    mov $SEL_KERNEL_DS, %eax
    mov %eax, %ds
    mov %eax, %es
    mov %eax, %ss
    mov ap_stack_top, %esp
    call enter_long_mode
    ljmp $SEL_KERNEL_CS, $start64_ap
    .p2align 4, 0x90

    .text
    .code64
start64:
    mov $kstacks + KSTACK_SIZE, %rsp
    mov multiboot_info, %edi
    xor %ebp, %ebp
    call boot_c
1:  hlt
    jmp 1b

start64_ap:
    mov ap_stack_top, %rsp
    xor %ebp, %ebp
    call ap_main
1:  hlt
    jmp 1b

    .data
    .p2align 3
    .globl gdt, gdt_pointer
gdt:
    .quad 0
    .quad 0x00af9b000000ffff /* kernel code */
    .quad 0x00cf93000000ffff /* kernel data */
    .quad 0x00cff3000000ffff /* user data */
    .quad 0x00affb000000ffff /* user code */
    .fill 2 * MAX_CPUS, 8, 0 /* TSS descriptors, filled in by cpu.c */
gdt_end:
    .word 0, 0, 0
gdt_pointer:
    .word gdt_end - gdt - 1
    .quad gdt

/*
 * The other CPUs begin here in real mode. smp.c copies it to AP_TRAMPOLINE, so it may use no relocated address but
 * absolute ones. It is data to the loader: nothing of it runs where it is linked.
 */
    .globl ap_trampoline, ap_trampoline_end
ap_trampoline:
    .code16
    cli
    cld
    xor %ax, %ax
    mov %ax, %ds
    lgdtl AP_TRAMPOLINE + (ap_gdt_pointer - ap_trampoline)
    mov $1, %eax
    mov %eax, %cr0
    ljmpl $SEL_AP_CODE32, $start32_ap
    .set SEL_AP_CODE32, 0x18
    .p2align 3
ap_gdt:
    .quad 0
    .quad 0
    .quad 0x00cf93000000ffff /* SEL_KERNEL_DS */
    .quad 0x00cf9b000000ffff /* SEL_AP_CODE32 */
ap_gdt_pointer:
    .word ap_gdt_pointer - ap_gdt - 1
    .long AP_TRAMPOLINE + (ap_gdt - ap_trampoline)
ap_trampoline_end:
    .code64

    .globl ap_stack_top
    .p2align 3
ap_stack_top: .quad 0

    .bss
    .p2align 12
    .globl pml4
pml4:      .skip 4096
pdpt:      .skip 4096
page_dirs: .skip 4 * 4096
boot_stack: .skip 512
boot_stack_top:
    .globl multiboot_info
multiboot_info: .skip 8

    .section .note.GNU-stack, "", @progbits
