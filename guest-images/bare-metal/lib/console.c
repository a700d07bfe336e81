/* Output on COM1, and the ways to end. */
#include "lib.h"

#define COM1 0x3f8
#define LINE_STATUS 5
#define TRANSMIT_EMPTY 0x20
#define DATA_READY 0x01

void console_setup(void)
{
    outb(COM1 + 1, 0);    /* no interrupts */
    outb(COM1 + 3, 0x80); /* divisor 1: 115200 baud */
    outb(COM1 + 0, 1);
    outb(COM1 + 1, 0);
    outb(COM1 + 3, 3);    /* 8n1 */
    outb(COM1 + 2, 7);    /* FIFOs on and empty */
}

void putchar_raw(char c)
{
    /* Bounded, so that a machine without a UART does not hang here. */
    for (u32 i = 0; i < 10000 && !(inb(COM1 + LINE_STATUS) & TRANSMIT_EMPTY); i++)
        pause();
    outb(COM1, c);
}

bool getchar_ready(void) { return inb(COM1 + LINE_STATUS) & DATA_READY; }
char getchar_raw(void) { return inb(COM1); }

static void pad(char c, int n)
{
    while (n-- > 0)
        putchar_raw(c);
}

static void put_number(u64 v, u32 base, bool negative, int width, bool left, char fill, bool group)
{
    char buf[32];
    int n = 0, digits = 0;

    do {
        if (group && digits && digits % 3 == 0)
            buf[n++] = ',';
        buf[n++] = "0123456789abcdef"[v % base];
        v /= base;
        digits++;
    } while (v);
    if (negative && fill == ' ')
        buf[n++] = '-';
    else if (negative)
        putchar_raw('-'), width--;
    if (!left)
        pad(fill, width - n);
    for (int i = n; i > 0; i--)
        putchar_raw(buf[i - 1]);
    if (left)
        pad(' ', width - n);
}

static void put_string(const char *s, int width, bool left)
{
    int n = 0;
    while (s[n])
        n++;
    if (!left)
        pad(' ', width - n);
    for (int i = 0; i < n; i++)
        putchar_raw(s[i]);
    if (left)
        pad(' ', width - n);
}

void kvprintf(const char *fmt, __builtin_va_list ap)
{
    for (; *fmt; fmt++) {
        bool left = false, group = false, is_long = false;
        char fill = ' ';
        int width = 0;

        if (*fmt != '%') {
            if (*fmt == '\n')
                putchar_raw('\r');
            putchar_raw(*fmt);
            continue;
        }
        for (fmt++;; fmt++) {
            if (*fmt == '-')
                left = true;
            else if (*fmt == '0')
                fill = '0';
            else if (*fmt == '\'')
                group = true;
            else
                break;
        }
        if (*fmt == '*') {
            width = __builtin_va_arg(ap, int);
            fmt++;
        }
        while (*fmt >= '0' && *fmt <= '9')
            width = width * 10 + *fmt++ - '0';
        if (*fmt == 'l') {
            is_long = true;
            fmt++;
        }
        switch (*fmt) {
        case 'c':
            putchar_raw(__builtin_va_arg(ap, int));
            break;
        case 's':
            put_string(__builtin_va_arg(ap, const char *), width, left);
            break;
        case 'd': {
            s64 v = is_long ? __builtin_va_arg(ap, s64) : __builtin_va_arg(ap, int);
            put_number(v < 0 ? -(u64)v : (u64)v, 10, v < 0, width, left, fill, group);
            break;
        }
        case 'u':
        case 'x': {
            u64 v = is_long ? __builtin_va_arg(ap, u64) : __builtin_va_arg(ap, u32);
            put_number(v, *fmt == 'u' ? 10 : 16, false, width, left, fill, group);
            break;
        }
        case '\0':
            return;
        default:
            putchar_raw(*fmt);
        }
    }
}

void kprintf(const char *fmt, ...)
{
    __builtin_va_list ap;
    __builtin_va_start(ap, fmt);
    kvprintf(fmt, ap);
    __builtin_va_end(ap);
}

void power_off(void)
{
    cli();
    outw(0x604, 0x2000); /* SLP_EN in the PM1a control register, sleep type 0 */
    for (;;)
        asm volatile("hlt");
}

void debug_exit(u8 code)
{
    cli();
    outb(0xf4, code);
    for (;;)
        asm volatile("hlt");
}

void panic(const char *fmt, ...)
{
    __builtin_va_list ap;
    cli();
    kprintf("\nBail out! ");
    __builtin_va_start(ap, fmt);
    kvprintf(fmt, ap);
    __builtin_va_end(ap);
    kprintf("\n");
    debug_exit(0x7f);
}

/* GCC may call these for copies and clears of its own. */
void *memset(void *p, int c, u64 n);
void *memcpy(void *d, const void *s, u64 n);
void *memset(void *p, int c, u64 n)
{
    void *d = p;
    asm volatile("rep stosb" : "+D"(d), "+c"(n) : "a"(c) : "memory");
    return p;
}
void *memcpy(void *d, const void *s, u64 n)
{
    void *r = d;
    asm volatile("rep movsb" : "+D"(d), "+S"(s), "+c"(n) : : "memory");
    return r;
}
