# Guest of the snapshot tests. Each of 2000 rounds writes and reads a port, changes memory, reads a
# counter by RDPMC, and writes two bytes to the serial port, so its output shows any instruction that is
# lost or done twice. A counter overflows while LVTPC is masked; the PMI follows after three quarters.
#
# as --32 guest.s -o guest.o
# ld -m elf_i386 -Ttext=0x100020 -o guest.elf guest.o
# objcopy -O binary -j .text guest.elf guest.bin
.intel_syntax noprefix
.code32
.set ITER, 2000
.text
.globl _start
_start:
    cli
    mov esp, 0x1f0000
    # Gate of NMI: selector 0x10.
    mov eax, offset handler
    mov edx, eax
    and eax, 0xffff
    or eax, 0x00100000
    mov [0x180010], eax
    and edx, 0xffff0000
    or edx, 0x8e00
    mov [0x180014], edx
    lidt [idtr]
    mov dword ptr ds:[0xfee000f0], 0x1ff
    mov dword ptr ds:[0xfee00340], 0x10400
    # Counter 0 counts port exits, counter 1 too, with an interrupt after ITER of them.
    xor edx, edx
    mov ecx, 0xc1
    xor eax, eax
    wrmsr
    mov ecx, 0xc2
    mov eax, -ITER
    wrmsr
    mov ecx, 0x186
    mov eax, 0x4302ff
    wrmsr
    mov ecx, 0x187
    mov eax, 0x5302ff
    wrmsr
    xor esi, esi
    mov ebx, 1
next:
    imul ebx, ebx, 1103515245
    add ebx, 12345
    mov eax, ebx
    shr eax, 16
    mov edi, esi
    and edi, 0xfff
    add [0x190000 + edi*4], eax
    mov dx, 0x3ff
    out dx, al
    xor eax, eax
    in al, dx
    add al, [0x190000 + edi*4]
    mov dx, 0x3f8
    out dx, al
    xor ecx, ecx
    rdpmc
    mov dx, 0x3f8
    out dx, al
    cmp esi, ITER*3/4
    jne 1f
    mov dword ptr ds:[0xfee00340], 0x400
1:
    inc esi
    cmp esi, ITER
    jb next
    # The results.
    mov ecx, 0xc1
    rdmsr
    call put
    mov ecx, 0xc2
    rdmsr
    call put
    mov eax, [0x1a0000]
    call put
    mov ecx, 0x38e
    rdmsr
    call put
    mov eax, [0x1a0004]
    cmp eax, ITER*3/4
    setae al
    movzx eax, al
    call put
    mov al, 0x10
    out 0xf4, al
2:  hlt
    jmp 2b
put:
    mov ecx, 4
    mov dx, 0x3f8
3:  out dx, al
    shr eax, 8
    loop 3b
    ret
handler:
    pusha
    inc dword ptr ds:[0x1a0000]
    mov ds:[0x1a0004], esi
    mov ecx, 0x390
    mov eax, 2
    xor edx, edx
    wrmsr
    popa
    # Software-only KVM does not emulate IRET here. No further NMI is needed.
    push dword ptr [esp+8]
    popfd
    ret 8
.balign 4
idtr:
    .word 0x1f
    .long 0x180000
